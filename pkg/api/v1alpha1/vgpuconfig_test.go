// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const head = `"apiVersion": "cgpu.io/v1alpha1", "kind": "VGPUConfig"`

func ptr[T any](v T) *T { return &v }

var sameQuantity = cmp.Comparer(func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })

func TestDecode(t *testing.T) {
	meta := metav1.TypeMeta{APIVersion: APIVersion, Kind: Kind}
	for text, want := range map[string]*VGPUConfig{
		`{` + head + `}`: {TypeMeta: meta},
		`{` + head + `, "weight": 64, "priority": "high", "percent": 100, "spill": "1Gi", "containers": 64}`: {TypeMeta: meta,
			Weight: ptr[int64](64), Priority: ptr("high"), Percent: ptr[int64](100), Spill: ptr(resource.MustParse("1Gi")),
			Containers: ptr[int64](64)},
		`{` + head + `, "spill": 0}`:            {TypeMeta: meta, Spill: ptr(resource.MustParse("0"))},
		`{` + head + `, "spill": 1048576}`:      {TypeMeta: meta, Spill: ptr(resource.MustParse("1Mi"))},
		`{` + head + `, "weight": null}`:        {TypeMeta: meta},
		`{` + head + `, "domain": "team-a"}`:    {TypeMeta: meta, Domain: ptr("team-a")},
		`{"weight": 1, ` + head + `}`:           {TypeMeta: meta, Weight: ptr[int64](1)},
		`{` + head + `, "priority": "default"}`: {TypeMeta: meta, Priority: ptr("default")},
	} {
		got, err := Decode([]byte(text))
		if err != nil || !cmp.Equal(got, want, sameQuantity) {
			t.Errorf("%s: %v %s", text, err, cmp.Diff(want, got, sameQuantity))
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	for text, want := range map[string]string{
		``:     "VGPUConfig: unexpected end",
		`null`: `apiVersion ""`,
		`[]`:   "cannot unmarshal",
		`{}`:   "want apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig",
		`{"apiVersion": "gpu.example.com/v1", "kind": "GpuConfig", "sharing": 1}`: `apiVersion "gpu.example.com/v1", kind "GpuConfig": want`,
		`{` + head + `, "wieght": 3}`:                                           `unknown field "wieght"`,
		`{` + head + `, "Weight": 3}`:                                           `unknown field "Weight"`,
		`{` + head + `, "weight": 3, "weight": 4}`:                              `duplicate field "weight"`,
		`{` + head + `, "weight": 0}`:                                           "weight: 0: want 1 to 64",
		`{` + head + `, "weight": 65}`:                                          "weight: 65: want 1 to 64",
		`{` + head + `, "weight": 1.5}`:                                         "weight",
		`{` + head + `, "weight": "1"}`:                                         "weight",
		`{` + head + `, "weight": 1e30}`:                                        "weight",
		`{` + head + `, "percent": 101}`:                                        "percent: 101: want 1 to 100",
		`{` + head + `, "percent": -1, "weight": 0}`:                            "weight: 0: want 1 to 64; percent: -1: want 1 to 100",
		`{` + head + `, "containers": 65}`:                                      "containers: 65: want 1 to 64",
		`{` + head + `, "priority": "urgent"}`:                                  `priority: "urgent": want best-effort, default, high`,
		`{` + head + `, "domain": ""}`:                                          `domain: "": want 1 to 63 letters`,
		`{` + head + `, "domain": "a/b"}`:                                       `domain: "a/b": want`,
		`{` + head + `, "domain": 1}`:                                           "domain",
		`{` + head + `, "priority": ""}`:                                        `priority: "": want`,
		`{` + head + `, "spill": "4 GiB"}`:                                      "quantities must match",
		`{` + head + `, "spill": "1Ki"}`:                                        "spill: 1Ki: want 0, or 1Mi to 1Pi",
		`{` + head + `, "spill": "-1Gi"}`:                                       "spill: -1Gi: want 0",
		`{` + head + `, "spill": "1Ei"}`:                                        "spill: 1Ei: want 0",
		`{` + head + `} {}`:                                                     "after top-level value",
		`{` + head + `, "spill": "` + strings.Repeat("1", MaxParameters) + `"}`: "at most 10240 are read",
	} {
		got, err := Decode([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.120s: %+v, %v, want %q", text, got, err, want)
		}
	}
}

func TestOverrideAndDefault(t *testing.T) {
	class := &VGPUConfig{Weight: ptr[int64](2), Priority: ptr("best-effort"), Spill: ptr(resource.MustParse("1Gi"))}
	claim := &VGPUConfig{Weight: ptr[int64](8), Spill: ptr(resource.MustParse("0")), Percent: ptr[int64](30), Containers: ptr[int64](2),
		Domain: ptr("a")}
	got := new(VGPUConfig)
	got.Override(class)
	got.Override(claim)
	want := &VGPUConfig{Weight: ptr[int64](8), Priority: ptr("best-effort"), Spill: ptr(resource.MustParse("0")), Percent: ptr[int64](30),
		Containers: ptr[int64](2), Domain: ptr("a")}
	if d := cmp.Diff(want, got, sameQuantity); d != "" {
		t.Error(d)
	}
	got.Default()
	want.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: Kind}
	if d := cmp.Diff(want, got, sameQuantity); d != "" {
		t.Errorf("what was said is no default: %s", d)
	}
	none := new(VGPUConfig)
	none.Default()
	if *none.Weight != 1 || *none.Priority != "default" || !none.Spill.IsZero() || none.Percent != nil || none.Containers != nil ||
		none.Domain != nil {
		t.Errorf("%+v", none)
	}
	if err := none.Validate(); err != nil {
		t.Error(err)
	}
}

// FuzzDecode: whatever is read is within the bounds, and reads the same when it is written and read again.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{` + head + `, "weight": 64, "priority": "high", "percent": 100, "spill": "1Gi", "containers": 64}`))
	f.Add([]byte(`{` + head + `, "spill": 1e9}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Decode(raw)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: %v", raw, err)
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Errorf("%q: %v", raw, err)
		}
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Decode(text)
		if err != nil || !cmp.Equal(c, again, sameQuantity) {
			t.Errorf("%q: %s: %v %s", raw, text, err, cmp.Diff(c, again, sameQuantity))
		}
	})
}
