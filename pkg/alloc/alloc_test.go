// SPDX-License-Identifier: Apache-2.0

package alloc

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Share{
		"id=c/1,uuid=GPU-a,memory=6442450944": {ID: "c/1", UUID: "GPU-a", Containers: 1, Slice: quota.Slice{Limit: 6 * quota.GiB,
			Share: quota.Share{Priority: quota.PriorityDefault}}},
		"id=c,memory=1048576": {ID: "c", Containers: 1, Slice: quota.Slice{Limit: quota.MiB,
			Share: quota.Share{Priority: quota.PriorityDefault}}},
		"id=c,uuid=GPU-a,memory=all": {ID: "c", UUID: "GPU-a", Whole: true, Containers: 1,
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}},
		"id=c,memory=1048576,containers=2,percent=30,weight=3,priority=high,spill=2097152": {ID: "c", Containers: 2,
			Slice: quota.Slice{Limit: quota.MiB, Spill: 2 * quota.MiB, Share: quota.Share{Percent: 30, Weight: 3, Priority: quota.PriorityHigh}}},
		"id=c,memory=1048576,domain=team-a": {ID: "c", Containers: 1, Domain: "team-a", Slice: quota.Slice{Limit: quota.MiB,
			Share: quota.Share{Priority: quota.PriorityDefault}}},
		"id=c,memory=1048576,priority=best-effort": {ID: "c", Containers: 1, Slice: quota.Slice{Limit: quota.MiB,
			Share: quota.Share{Priority: quota.PriorityBestEffort}}},
	} {
		got, err := Parse(text)
		if err != nil || !cmp.Equal(got, want) {
			t.Errorf("%s: %v %s", text, err, cmp.Diff(want, got))
		}
		if got.Text() != text {
			t.Errorf("%s is written %s", text, got.Text())
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "name=value",
		"id=c":                                "memory: is missing",
		"memory=1048576":                      "id: is missing",
		"id=c,memory=0":                       "at least",
		"id=c,memory=-1":                      "at least",
		"id=c,memory=6GiB":                    "number of bytes",
		"id=c,memory=99999999999999999999":    "number of bytes",
		"id=c,id=d,memory=1048576":            "once",
		"id=c,memory=1048576,percent=101":     "1 to 100",
		"id=c,memory=1048576,weight=0":        "1 to 64",
		"id=c,memory=1048576,shiny=1":         "not known",
		"id=c,memory=1048576,domain=a/b":      "domain: want 1 to 63 letters",
		"id=c,memory=all":                     "wants id and uuid",
		"id=c,uuid=GPU-a,memory=all,weight=2": "wants id and uuid",
		"id=c\n,memory=1048576":               "sign",
		"id=" + strings.Repeat("c", 2000) + ",memory=1048576": "at most 1024",
	} {
		if got, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %+v, %v, want %q", text, got, err, want)
		}
	}
}

func TestHook(t *testing.T) {
	want := Share{ID: "c/1", UUID: "GPU-a", Containers: 1, Slice: quota.Slice{Limit: quota.GiB,
		Share: quota.Share{Priority: quota.PriorityDefault}}}
	got, ours, err := FromHookArgs(HookArgs(want))
	if err != nil || !ours || !cmp.Equal(got, want) {
		t.Errorf("%v %v %s", ours, err, cmp.Diff(want, got))
	}
	for _, args := range [][]string{nil, {"cgpu-hook", "release", "--id", "x"}, {"cgpu-hook", "allocated", "other", "x"}} {
		if _, ours, err := FromHookArgs(args); ours || err != nil {
			t.Errorf("%q: %v, %v", args, ours, err)
		}
	}
	for _, args := range [][]string{{"cgpu-hook", "allocated", AnnotationShares}, {"cgpu-hook", "allocated", AnnotationShares, "id=c"}} {
		if _, ours, err := FromHookArgs(args); !ours || err == nil {
			t.Errorf("%q: %v, %v", args, ours, err)
		}
	}
}

func TestAnnotations(t *testing.T) {
	a := Share{ID: "a", UUID: "GPU-a", Containers: 1, Slice: quota.Slice{Limit: quota.GiB,
		Share: quota.Share{Priority: quota.PriorityDefault}}}
	b := Share{ID: "b", UUID: "GPU-b", Whole: true, Containers: 1, Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}
	text := Annotate([]Share{a, b})
	capped := a
	capped.Percent = 30
	got, err := FromAnnotations(map[string]string{AnnotationShares: text, AnnotationPercent: "30"})
	if err != nil || !cmp.Equal(got, []Share{capped, b}) {
		t.Errorf("%v %s", err, cmp.Diff([]Share{capped, b}, got))
	}
	if got, err := FromAnnotations(map[string]string{"alloc.example.org/shares": text}); got != nil || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []map[string]string{
		{AnnotationPercent: "30"},
		{AnnotationShares: ""},
		{AnnotationShares: text, AnnotationPercent: "0"},
		{AnnotationShares: text + ";"},
		{AnnotationShares: strings.Repeat("x", 1<<20)},
	} {
		if got, err := FromAnnotations(bad); err == nil {
			t.Errorf("%.80q: %+v", bad, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("id=c/1,uuid=GPU-a,memory=6442450944,percent=30,weight=2,priority=high,spill=1048576,containers=2")
	f.Add("id=c,uuid=GPU-a,memory=all")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		if again, err := Parse(s.Text()); err != nil || !cmp.Equal(s, again) {
			t.Errorf("%q: %v %s", text, err, cmp.Diff(s, again))
		}
	})
}
