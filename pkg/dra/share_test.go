// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const (
	claimUID = "4a3d8f1e-0000-4000-8000-00000000c1a1"
	shareA   = "11111111-0000-4000-8000-000000000000"
	shareB   = "22222222-0000-4000-8000-000000000000"
)

func ptr[T any](v T) *T { return &v }

type result = resourceapi.DeviceRequestAllocationResult

// used is consumedCapacity as "memory cores containers".
func used(s string) map[resourceapi.QualifiedName]resource.Quantity {
	c := map[resourceapi.QualifiedName]resource.Quantity{}
	for i, v := range strings.Fields(s) {
		c[[]resourceapi.QualifiedName{"memory", "cores", "containers"}[i]] = resource.MustParse(v)
	}
	return c
}

// resultOf is what the scheduler writes for a share of GPU 0.
func resultOf(capacity string) result {
	return result{Request: "gpu", Driver: DriverName, Pool: "node1", Device: strings.ToLower(uuid(0)),
		ShareID: ptr(types.UID(shareA)), ConsumedCapacity: used(capacity)}
}

func configFor(source resourceapi.AllocationConfigSource, fields string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{Source: source, Requests: requests, DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: DriverName, Parameters: runtime.RawExtension{
			Raw: []byte(`{"apiVersion":"cgpu.io/v1alpha1","kind":"VGPUConfig"` + fields + `}`)}}}}
}

func claimWith(results []result, configs ...resourceapi.DeviceAllocationConfiguration) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "claim", UID: claimUID},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results, Config: configs}}},
	}
}

// asking lets a claim's request be of a class, and name so much memory or none.
func asking(claim *resourceapi.ResourceClaim, class, memory string) *resourceapi.ResourceClaim {
	r := &resourceapi.ExactDeviceRequest{DeviceClassName: class}
	if memory != "" {
		r.Capacity = &resourceapi.CapacityRequirements{Requests: used(memory)}
	}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: r}}
	return claim
}

const (
	vgpuClass = "vgpu.cgpu.io"

	byClass = resourceapi.AllocationConfigSourceClass
	byClaim = resourceapi.AllocationConfigSourceClaim
)

func share(text string) string {
	return fmt.Sprintf("id=%s/%s,uuid=%s,%s", claimUID, shareA, uuid(0), text)
}

func TestShares(t *testing.T) {
	const sixGi, all = "memory=6442450944", "15109Mi"
	type configs = []resourceapi.DeviceAllocationConfiguration
	for name, c := range map[string]struct {
		capacity   string
		configs    configs
		overcommit float64
		class      string
		want       string
	}{
		"memory":                    {"6Gi 0 1", nil, 1, vgpuClass, share(sixGi + ",weight=1")},
		"memory and cores":          {"6Gi 30 1", nil, 1, vgpuClass, share(sixGi + ",percent=30,weight=1")},
		"all cores":                 {"6Gi 100 1", nil, 1, vgpuClass, share(sixGi + ",percent=100,weight=1")},
		"decimal":                   {"6442450944 0 1", nil, 1, vgpuClass, share(sixGi + ",weight=1")},
		"not whole MiB":             {"6442450945 0 1", nil, 1, vgpuClass, share(sixGi + ",weight=1")},
		"a part of a byte":          {"6442450943500m 1500m 1", nil, 1, vgpuClass, share("memory=6441402368,percent=1,weight=1")},
		"exact as a decimal":        {"6442450944000m 0 1", nil, 1, vgpuClass, share(sixGi + ",weight=1")},
		"with the domain":           {"6Gi 0 1", nil, 1, vgpuClass, share(sixGi + ",weight=1")},
		"whole":                     {all + " 0 1", nil, 1, WholeClass, share("memory=all")},
		"whole, cores do not count": {all + " 30 1", nil, 1, WholeClass, share("memory=all")},
		"whole, weight does not": {all + " 0 1", configs{configFor(byClass, `,"weight":5,"priority":"high"`)}, 1, WholeClass,
			share("memory=all")},
		"whole but capped": {all + " 50 1", configs{configFor(byClaim, `,"percent":40`)}, 1, WholeClass,
			share("memory=15842934784,percent=40,weight=1")},
		"whole and spill": {all + " 0 1", configs{configFor(byClaim, `,"spill":"1Gi"`)}, 1, WholeClass,
			share("memory=15842934784,weight=1,spill=1073741824")},
		"whole in two":                     {all + " 0 2", nil, 1, vgpuClass, share("memory=7920943104,containers=2,weight=1")},
		"all of a share":                   {all + " 0 1", nil, 1, vgpuClass, share("memory=15842934784,weight=1")},
		"all of a class of others":         {all + " 0 1", nil, 1, "whole.example.com", share("memory=15842934784,weight=1")},
		"whole, since less is promised":    {"30218Mi 0 1", nil, 1, WholeClass, share("memory=all")},
		"whole, since more is promised":    {all + " 0 1", nil, 2, WholeClass, share("memory=all")},
		"whole, since the card has more":   {"15000Mi 0 1", nil, 1, WholeClass, share("memory=all")},
		"a share, since less is promised":  {"30218Mi 0 1", nil, 1, vgpuClass, share("memory=15842934784,weight=1")},
		"a share, since the card has less": {"16000Mi 0 1", nil, 1, vgpuClass, share("memory=15842934784,weight=1")},
		"the card, more promised":          {all + " 0 1", nil, 2, vgpuClass, share("memory=15842934784,weight=1")},
		"all that is promised":             {"30218Mi 0 1", nil, 2, WholeClass, share("memory=all")},
		"all promised, capped": {"30218Mi 10 1", configs{configFor(byClaim, `,"percent":10`)}, 2, vgpuClass,
			share("memory=15842934784,percent=10,weight=1")},
		"all promised, in two":   {"30218Mi 0 2", nil, 2, vgpuClass, share("memory=15842934784,containers=2,weight=1")},
		"containers by capacity": {"6Gi 30 3", nil, 1, vgpuClass, share("memory=2147483648,containers=3,percent=10,weight=1")},
		"containers lowered": {"6Gi 30 3", configs{configFor(byClaim, `,"containers":2`)}, 1, vgpuClass,
			share("memory=3221225472,containers=2,percent=15,weight=1")},
		"odd containers": {"7Mi 0 2", nil, 1, vgpuClass, share("memory=3145728,containers=2,weight=1")},
		"everything": {"6Gi 30 1", configs{configFor(byClaim,
			`,"weight":64,"priority":"best-effort","percent":20,"spill":"2Gi","containers":1`)}, 1, vgpuClass,
			share(sixGi + ",percent=20,weight=64,priority=best-effort,spill=2147483648")},
		"claim over class, in any order": {"6Gi 0 1", configs{configFor(byClaim, `,"weight":3`),
			configFor(byClass, `,"weight":2,"priority":"high"`)}, 1, vgpuClass,
			share(sixGi + ",weight=3,priority=high")},
		"later over earlier": {"6Gi 0 1", configs{configFor(byClaim, `,"weight":3,"spill":"1Gi"`),
			configFor(byClaim, `,"weight":4,"spill":0`)}, 1, vgpuClass, share(sixGi + ",weight=4")},
		"a trust domain, the class's": {"6Gi 0 1", configs{configFor(byClass, `,"domain":"team"`)}, 1, vgpuClass,
			share(sixGi + ",weight=1,domain=team")},
		"of another request": {"6Gi 0 1", configs{configFor(byClaim, `,"weight":3`, "other"), configFor(byClaim, `,"weight":4`, "x", "gpu")},
			1, vgpuClass, share(sixGi + ",weight=4")},
		"of another driver": {"6Gi 0 1", configs{{Source: byClaim, DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.example.com",
				Parameters: runtime.RawExtension{Raw: []byte(`{"x":1}`)}}}}}, 1, vgpuClass, share(sixGi + ",weight=1")},
	} {
		tab := tableOf(2)
		tab.Config.Overcommit = c.overcommit
		tab.GPUs[0].Memory = 15109 * quota.MiB
		r := resultOf(c.capacity)
		if name == "with the domain" {
			r.ConsumedCapacity[DriverName+"/memory"] = r.ConsumedCapacity["memory"]
			delete(r.ConsumedCapacity, "memory")
		}
		list, err := node{"node1", tab, nil, nil}.shares(asking(claimWith([]result{{Request: "nic", Driver: "nic.example.com"}, r},
			c.configs...), c.class, ""))
		if err != nil || len(list) != 1 || list[0].share.Text() != c.want {
			t.Errorf("%s: %v\n got %+v\nwant %s", name, err, list, c.want)
		}
	}
}

// A memory that the claim names is no whole GPU, whatever class it is of, and neither is what no request says.
func TestWholeIsAsked(t *testing.T) {
	all := func(request string) *resourceapi.ResourceClaim {
		r := resultOf("15109Mi 0 1")
		r.Request = request
		return claimWith([]result{r})
	}
	alternatives := all("gpu/two")
	alternatives.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "one", DeviceClassName: vgpuClass}, {Name: "two", DeviceClassName: WholeClass}}}}
	other := all("gpu/one")
	other.Spec = alternatives.Spec
	domain := asking(all("gpu"), WholeClass, "15109Mi")
	requests := domain.Spec.Devices.Requests[0].Exactly.Capacity.Requests
	requests[DriverName+"/memory"] = requests["memory"]
	delete(requests, "memory")
	cores := asking(all("gpu"), WholeClass, "15109Mi")
	cores.Spec.Devices.Requests[0].Exactly.Capacity.Requests = map[resourceapi.QualifiedName]resource.Quantity{
		"cores": resource.MustParse("30")}
	for name, c := range map[string]struct {
		claim *resourceapi.ResourceClaim
		whole bool
	}{
		"class":              {asking(all("gpu"), WholeClass, ""), true},
		"class and cores":    {cores, true},
		"class and memory":   {asking(all("gpu"), WholeClass, "15109Mi"), false},
		"class and a domain": {domain, false},
		"another class":      {asking(all("gpu"), vgpuClass, ""), false},
		"the second choice":  {alternatives, true},
		"the first choice":   {other, false},
		"no such request":    {asking(all("gpu2"), WholeClass, ""), false},
		"no requests":        {all("gpu"), false},
	} {
		list, err := node{"node1", tableOf(1), nil, nil}.shares(c.claim)
		if err != nil || len(list) != 1 || list[0].share.Whole != c.whole || !c.whole && list[0].share.Limit != 15109*quota.MiB {
			t.Errorf("%s: %+v, %v", name, list, err)
		}
	}
}

func TestSharesWithoutCapacities(t *testing.T) {
	r := resultOf("")
	r.ShareID, r.ConsumedCapacity = nil, nil
	id := claimUID + "/" + strings.ToLower(uuid(0))
	for _, c := range []struct {
		class, fields string
		want          alloc.Share
	}{
		{WholeClass, "", alloc.Share{ID: id, UUID: uuid(0), Whole: true, Containers: 1,
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}},
		{vgpuClass, "", alloc.Share{ID: id, UUID: uuid(0), Slice: quota.Slice{Limit: 15109 * quota.MiB,
			Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}, Containers: 1}},
		{vgpuClass, `,"percent":30,"containers":2`, alloc.Share{ID: id, UUID: uuid(0), Slice: quota.Slice{Limit: 7554 * quota.MiB,
			Share: quota.Share{Percent: 15, Weight: 1, Priority: quota.PriorityDefault}}, Containers: 2}},
	} {
		list, err := node{"node1", tableOf(1), nil, nil}.shares(asking(claimWith([]result{r}, configFor(byClaim, c.fields)), c.class, ""))
		want := []allocated{{"gpu", strings.ToLower(uuid(0)), nil, c.want}}
		if err != nil || !cmp.Equal(list, want, cmp.AllowUnexported(allocated{})) {
			t.Errorf("%+v: %v %s", c, err, cmp.Diff(want, list, cmp.AllowUnexported(allocated{})))
		}
	}
}

// Containers of one claim get no more together than one would.
func TestDivided(t *testing.T) {
	for _, c := range []struct{ containers, fields, want string }{
		{"1", `,"weight":64,"spill":"10Gi"`, "memory=6442450944,weight=64,spill=10737418240"},
		{"20", `,"weight":64,"spill":"10Gi"`, "memory=321912832,containers=20,weight=3,spill=536870912"},
		{"20", `,"weight":64,"containers":4`, "memory=1610612736,containers=4,weight=16"},
		{"2", `,"weight":1`, "memory=3221225472,containers=2,weight=1"},
	} {
		claim := asking(claimWith([]result{resultOf("6Gi 0 " + c.containers)}, configFor(byClaim, c.fields)), vgpuClass, "6Gi")
		list, err := node{"node1", tableOf(1), nil, nil}.shares(claim)
		if err != nil || list[0].share.Text() != share(c.want) {
			t.Errorf("%+v: %v, %v", c, list, err)
		}
	}
}

// Under policy fixed the cap is what the scheduler counted; a weight would be one that it did not.
func TestFixed(t *testing.T) {
	cards := map[string]sched.Card{uuid(0): {Policy: sched.PolicyFixed, MaxInst: 20}}
	for _, c := range []struct {
		used, fields, want string
		refused            bool
	}{
		{"6Gi 5 1", `,"weight":64`, "percent=5,weight=64", false},
		{"6Gi 0 1", "", "memory=6442450944,weight=1", false},
		{"6Gi 0 1", `,"weight":2`, "request some, and leave weight out", true},
		{"6Gi 0 1", `,"weight":2,"priority":"high"`, "priority=high", false},
		{"6Gi 0 2", `,"weight":2`, "weight=1", false},
	} {
		list, err := node{"node1", tableOf(1), nil, cards}.shares(asking(claimWith([]result{resultOf(c.used)}, configFor(byClaim, c.fields)),
			vgpuClass, "6Gi"))
		if (err != nil) != c.refused || c.refused && !strings.Contains(err.Error(), c.want) || !c.refused &&
			!strings.Contains(list[0].share.Text(), c.want) {
			t.Errorf("%+v: %+v, %v", c, list, err)
		}
	}
}

func TestSubrequests(t *testing.T) {
	for _, c := range []struct {
		requests []string
		want     bool
	}{{nil, true}, {[]string{"gpu"}, true}, {[]string{"gpu/big"}, true}, {[]string{"gpu/small"}, false}, {[]string{"gp"}, false}} {
		if got := applies(c.requests, "gpu/big"); got != c.want {
			t.Errorf("%v: %v", c.requests, got)
		}
	}
}

func TestSharesRefuse(t *testing.T) {
	edit := func(f func(*result)) []result {
		r := resultOf("6Gi 30 1")
		f(&r)
		return []result{r}
	}
	capacity := func(s string) []result { return edit(func(r *result) { r.ConsumedCapacity = used(s) }) }
	many := make([]result, alloc.MaxShares+1)
	for want, claim := range map[string]*resourceapi.ResourceClaim{
		"is not allocated":             {ObjectMeta: metav1.ObjectMeta{UID: claimUID}},
		`uid: "../../x"`:               {ObjectMeta: metav1.ObjectMeta{UID: "../../x"}},
		"uid: has 0 bytes":             {},
		"has 33 devices":               claimWith(many),
		"not of node node1":            claimWith(edit(func(r *result) { r.Pool = "node2" })),
		"adminAccess":                  claimWith(edit(func(r *result) { r.AdminAccess = ptr(true) })),
		"no such GPU any more":         claimWith(edit(func(r *result) { r.Device = "gpu-7" })),
		"GPU any more: delete the pod": claimWith(edit(func(r *result) { r.Device = strings.ToLower(uuid(1)) })), // another front end's
		"shareID: ":                    claimWith(edit(func(r *result) { r.ShareID = ptr(types.UID("a,uuid=x")) })),
		"but no shareID":               claimWith(edit(func(r *result) { r.ShareID = nil })),
		"occurs twice":                 claimWith(append(capacity("1Gi 0 1"), capacity("1Gi 0 1")...)),
		"requests gpu and more have shares of the same": claimWith(append(capacity("1Gi 0 1"),
			edit(func(r *result) { r.Request, r.ShareID = "more", ptr(types.UID(shareB)) })...)),
		"memory is missing":       claimWith(capacity("")),
		"cores is missing":        claimWith(capacity("6Gi")),
		"containers is missing":   claimWith(capacity("6Gi 0")),
		"memory: 0 is not within": claimWith(capacity("0 0 1")),
		"memory: -9223372036854775808 is not": claimWith(edit(func(r *result) {
			r.ConsumedCapacity["memory"] = *resource.NewQuantity(-1<<63,
				resource.BinarySI)
		})),
		"memory: 1Ki is not":             claimWith(capacity("1Ki 0 1")),
		"memory: 7Ei is not":             claimWith(capacity("7Ei 0 1")),
		"cores: 101 is not":              claimWith(capacity("6Gi 101 1")),
		"cores: -1 is not":               claimWith(capacity("6Gi -1 1")),
		"containers: 0 is not":           claimWith(capacity("6Gi 0 0")),
		"less than 1MiB for each":        claimWith(capacity("1Mi 0 2")),
		"spill: 1MiB among 2 containers": claimWith(capacity("6Gi 0 2"), configFor(byClaim, `,"spill":"1Mi"`)),
		"less than 1 for each":           claimWith(capacity("6Gi 1 2")),
		"containers: 2: the claim has 1": claimWith(capacity("6Gi 0 1"), configFor(byClaim, `,"containers":2`)),
		"percent: 31: the claim has 30":  claimWith(capacity("6Gi 30 1"), configFor(byClaim, `,"percent":31`)),
		`config 1 (FromClaim): VGPUConfig: unknown field`: claimWith(capacity("6Gi 30 1"), configFor(byClass, ""),
			configFor(byClaim, `,"shiny":31`)),
		`config 0 (FromClass): VGPUConfig: weight`: claimWith(capacity("6Gi 30 1"), configFor(byClass, `,"weight":65`)),
	} {
		list, err := node{"node1", tableOf(2), func(g device.GPU) bool { return g.Index == 0 }, nil}.shares(claim)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v, %v, want %q", list, err, want)
		}
	}
	// More than the card: overcommit is for many containers.
	tab := tableOf(1)
	tab.Config.Overcommit = 2
	if _, err := (node{"node1", tab, nil, nil}).shares(asking(claimWith(capacity("20Gi 0 1")), vgpuClass, "20Gi")); err == nil ||
		!strings.Contains(err.Error(), "more than the GPU has, 15109MiB") {
		t.Error(err)
	}
}

// FuzzShares: whatever a claim says, no container of it gets more than was consumed, nor more than the card.
func FuzzShares(f *testing.F) {
	f.Add("6Gi", "30", "1", `,"weight":2`)
	f.Add("15109Mi", "0", "2", `,"percent":1,"spill":"1Gi","containers":2`)
	f.Add("9223372036854775807", "100m", "64", ``)
	f.Fuzz(func(t *testing.T, memory, cores, containers, config string) {
		r := resultOf("")
		for name, v := range map[resourceapi.QualifiedName]string{"memory": memory, "cores": cores, "containers": containers} {
			q, err := resource.ParseQuantity(v)
			if err != nil {
				return
			}
			r.ConsumedCapacity[name] = q
		}
		tab := tableOf(1)
		list, err := node{"node1", tab, nil, nil}.shares(claimWith([]result{r}, configFor(byClaim, config)))
		if err != nil {
			return
		}
		s := list[0].share
		if got, err := alloc.Parse(s.Text()); err != nil || !cmp.Equal(got, s) {
			t.Errorf("%v: %v %s", s, err, cmp.Diff(s, got))
		}
		m, p, n := r.ConsumedCapacity["memory"], r.ConsumedCapacity["cores"], r.ConsumedCapacity["containers"]
		if s.Whole {
			t.Fatalf("%s of memory became a whole GPU", memory)
		}
		over := func(v uint64, q resource.Quantity) bool {
			return resource.NewQuantity(int64(v), resource.DecimalSI).Cmp(q) > 0
		}
		if over(uint64(s.Limit)*uint64(s.Containers), m) || over(uint64(s.Percent*s.Containers), p) || over(uint64(s.Containers), n) ||
			s.Limit > tab.GPUs[0].Memory || s.Limit == 0 || s.Containers < 1 {
			t.Errorf("%s %s %s %s: %v", memory, cores, containers, config, s)
		}
	})
}
