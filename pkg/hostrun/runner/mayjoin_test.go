// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestMayJoin: who comes through sudo must be among a domain's users; root names any.
func TestMayJoin(t *testing.T) {
	table := &device.Table{Config: device.Config{Domains: []device.Domain{{Name: "team", Users: []string{"ann", "1001"}}, {Name: "none"}}}}
	for _, test := range []struct {
		sudo, domain string
		user         hostrun.User
		ok           bool
	}{
		{"", "team", hostrun.User{Keep: true}, true},
		{"", "none", hostrun.User{UID: 1234}, true},
		{"0", "none", hostrun.User{}, true},
		{"1000", "team", hostrun.User{UID: 1000, Name: "ann"}, true},
		{"1001", "team", hostrun.User{UID: 1001, Name: "bob"}, true},
		{"1001", "team", hostrun.User{UID: 1001}, true},
		{"1002", "team", hostrun.User{UID: 1002, Name: "eve"}, false},
		{"1002", "team", hostrun.User{UID: 1002}, false},
		{"1000", "none", hostrun.User{UID: 1000, Name: "ann"}, false},
		{"1002", "", hostrun.User{UID: 1002, Name: "eve"}, true},
	} {
		t.Setenv("SUDO_UID", test.sudo)
		q := &quota.Quota{Domain: test.domain, Asked: map[string]string{"CGPU_DOMAIN": test.domain}}
		err := mayJoin(Command{Quota: q, Run: hostrun.Run{User: test.user}}, table)
		if (err == nil) != test.ok {
			t.Errorf("%+v: %v", test, err)
		}
		if err != nil && !strings.Contains(err.Error(), "is none of its users; have the administrator add") {
			t.Errorf("%+v: %v", test, err)
		}
	}
}
