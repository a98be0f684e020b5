// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

func TestGivePage(t *testing.T) {
	for _, test := range []struct {
		vgpus, native int
		preload       bool
		page, refused bool
	}{
		{vgpus: 0, page: true}, // to be placed
		{vgpus: 1, page: true},
		{vgpus: 10, native: 6, page: true},
		{vgpus: 10, native: 7},
		{vgpus: 16, preload: true, page: true},
		{vgpus: 16, native: 1, preload: true, refused: true},
	} {
		request := ledger.Request{Record: ledger.Record{
			Nonce: "n", Preload: test.preload, VGPUs: make([]ledger.VGPU, test.vgpus), Native: make([]string, test.native),
		}}
		want := ""
		if test.page {
			want = page.File("/r", "n")
		}
		if err := GivePage(&request, "/r"); (err != nil) != test.refused || request.Record.Page != want {
			t.Errorf("%+v: %q, %v", test, request.Record.Page, err)
		}
	}
}

func TestGiveLimiter(t *testing.T) {
	const library = "/lib/libcgpu.so"
	for name, test := range map[string]struct {
		quota         quota.Quota
		own           spec.Own
		library       string
		limiter, page string // with a guard
		refused       string // in preload mode
	}{
		"installed": {library: library, limiter: library, page: "/p"},
		"missing":   {page: "/p", refused: "libcgpu.so is not installed"},
		"off":       {library: library, quota: quota.Quota{NoLimiter: true}, page: "/p", refused: "CGPU_LIMITER=off"},
		"read-only": {library: library, own: spec.Own{ReadOnly: "/run"}, refused: "mount /run is read-only"},
		"own":       {library: library, own: spec.Own{Preload: "/etc", Loader: "/lib"}, limiter: library, page: "/p"},
	} {
		p := spec.Plan{Page: "/p"}
		if err := giveLimiter(&p, &test.quota, test.own, test.library); err != nil || p.Limiter != test.limiter || p.Page != test.page {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
		p = spec.Plan{Page: "/p", PageWritable: true}
		err := giveLimiter(&p, &test.quota, test.own, test.library)
		if (err != nil) != (test.refused != "") || err != nil &&
			(!strings.Contains(err.Error(), test.refused) || !strings.Contains(err.Error(), toGuard)) {
			t.Errorf("%s: in preload mode: %v", name, err)
		}
	}
	p := spec.Plan{}
	if err := giveLimiter(&p, &quota.Quota{}, spec.Own{}, library); err != nil || p.Limiter != "" {
		t.Errorf("without a page: %+v, %v", p, err)
	}
}
