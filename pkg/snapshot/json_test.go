// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
)

// TestNothingIsLost: each field of what is printed comes from somewhere. Of a view in which all are set, none is empty.
func TestNothingIsLost(t *testing.T) {
	var v View
	set(reflect.ValueOf(&v).Elem())
	v.GPUs[0].VGPUs[0].Native = false // which has no priority
	if got, want := empty(reflect.ValueOf(v.JSON()), "node"), []string{"node.GPUs.VGPUs.Native"}; !slices.Equal(got, want) {
		t.Errorf("empty: %v, want %v", got, want)
	}
	var s api.Status
	set(reflect.ValueOf(&s).Elem())
	if got := empty(reflect.ValueOf(*GuardJSON(s)), "guard"); got != nil {
		t.Errorf("empty: %v", got)
	}
	// What has nothing has empty lists, not null, and no priority where there is no limit.
	n := View{GPUs: []GPU{{VGPUs: []VGPU{{Native: true}}}}}.JSON()
	if x := n.GPUs[0].VGPUs[0]; x.Processes == nil || x.Priority != "" || x.Compute != nil || View.JSON(View{}).GPUs == nil {
		t.Errorf("%+v", n)
	}
}

// set gives each field of a value something that is not empty.
func set(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(1, 0)))
			return
		}
		for i := range v.NumField() {
			set(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		set(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		set(v.Elem())
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint64:
		v.SetUint(1)
	default:
		v.SetInt(1)
	}
}

// empty names the fields that are.
func empty(v reflect.Value, name string) (list []string) {
	switch {
	case v.IsZero():
		return []string{name}
	case v.Kind() == reflect.Pointer:
		return empty(v.Elem(), name)
	case v.Kind() == reflect.Slice:
		return empty(v.Index(0), name)
	case v.Kind() != reflect.Struct || v.Type() == reflect.TypeFor[time.Time]():
		return nil
	}
	for i := range v.NumField() {
		list = append(list, empty(v.Field(i), name+"."+v.Type().Field(i).Name)...)
	}
	return list
}
