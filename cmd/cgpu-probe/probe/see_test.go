// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestJudge(t *testing.T) {
	guarded := evidence{filtered: true, listener: true, denied: true, page: true, flags: page.FlagGuard, limit: quota.GiB, total: quota.GiB}
	but := func(change func(*evidence)) evidence {
		e := guarded
		change(&e)
		return e
	}
	for _, tt := range []struct {
		name    string
		e       evidence
		verdict string
		err     string
	}{
		{"guard", guarded, "guard", ""},
		{"guard, without the limiter's page", but(func(e *evidence) { e.page, e.limit = false, 0 }), "guard", ""},
		{"whole card", but(func(e *evidence) { e.native, e.limit = true, 0 }), "guard", ""},
		{"no filter", but(func(e *evidence) { e.filtered = false }), "none", "no seccomp filter"},
		{"no listener", but(func(e *evidence) { e.listener = false }), "none", "no guard sees"},
		{"permissive", but(func(e *evidence) { e.denied = false }), "none", "was carried out"},
		{"sees more", but(func(e *evidence) { e.total *= 2 }), "guard", "sees 2048MiB of memory, but its limit is 1024MiB"},
		{"preload", evidence{page: true, flags: page.FlagPreload, limiter: true, limit: 1, total: 1},
			"preload, which a program can walk around", ""},
		{"preload, sees more", evidence{page: true, flags: page.FlagPreload, limiter: true, limit: 1, total: 2}, "preload", "but its limit is"},
		{"preload, not loaded", evidence{page: true, flags: page.FlagPreload, limit: 1, total: 1}, "none", "has not loaded"},
		{"nothing", evidence{}, "none", "in no container of cgpu"},
	} {
		verdict, err := tt.e.judge()
		if !strings.HasPrefix(verdict, tt.verdict) || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %q, %v; want %q, %q", tt.name, verdict, err, tt.verdict, tt.err)
		}
	}
}
