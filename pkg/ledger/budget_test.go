// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// owned is a request for so much of the first GPU by a user of an account.
func owned(id, user, account string, limit quota.Bytes, budgets ...Budget) Request {
	return Request{Record: Record{ID: id, Nonce: id, LauncherPID: 1, Owners: []string{user, account},
		VGPUs: []VGPU{{UUID: twoGPUs[0].UUID, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: 1}}}}},
		GPUs: twoGPUs, Card: preempt, Refuse: Within(budgets)}
}

func TestBudget(t *testing.T) {
	for _, c := range []struct {
		name    string
		req     Request
		refused string // "" when admitted
	}{
		{"without a budget", owned("c", "user:1", "account:a", 4*gib), ""},
		{"just fits", owned("c", "user:1", "account:a", 2*gib, Budget{"user:1", 4 * gib}), ""},
		{"a byte too many", owned("c", "user:1", "account:a", 2*gib+1, Budget{"user:1", 4 * gib}),
			"asked for 2147483649B, but user:1 may have 4096MiB on this node, of which 2048MiB are free; wait for others of the same owner to " +
				"end, or ask for less"},
		{"another user's", owned("c", "user:3", "account:c", 4*gib, Budget{"user:3", 4 * gib}), ""},
		{"those of an account are counted together",
			owned("c", "user:3", "account:a", 2*gib, Budget{"user:3", 4 * gib}, Budget{"account:a", 6 * gib}), "account:a may have 6144MiB"},
		{"lowered since", owned("c", "user:1", "account:a", quota.MiB, Budget{"user:1", gib}), "of which 0MiB are free"},
	} {
		l := open(t)
		reserve(t, l, owned("a", "user:1", "account:a", 2*gib))
		reserve(t, l, owned("b", "user:2", "account:a", 3*gib))
		_, err := l.Reserve(c.req)
		if c.refused == "" && err == nil {
			continue
		}
		if refusal, ok := errors.AsType[*Refusal](err); c.refused == "" || !ok || refusal.Memory || !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.refused)
		}
	}
}
