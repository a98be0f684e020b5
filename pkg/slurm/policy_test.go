// SPDX-License-Identifier: Apache-2.0

package slurm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

const example = `
without = "refuse"
gpus = "gres"
[everyone]
memory = "5GiB"
weight = 4
[user.ann]
memory = "8GiB"
percent = 50
[account.physics]
memory = "12GiB"
percent = 40
`

func TestParse(t *testing.T) {
	got, err := parse("f", []byte(example))
	want := Policy{Without: Refuse, GPUs: ByGres, Everyone: Limits{Memory: 5 * quota.GiB, Weight: 4},
		Users:    map[string]Limits{"ann": {Memory: 8 * quota.GiB, Percent: 50}},
		Accounts: map[string]Limits{"physics": {Memory: 12 * quota.GiB, Percent: 40}}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for text, want := range map[string]string{
		`without = "show"`:                `without = "show": want hide, refuse or open`,
		`gpus = "all"`:                    `gpus = "all": want node or gres`,
		`memroy = 1`:                      "memroy: there is no such key",
		"[everyone]\nmemory = \"6XiB\"":   `[everyone]: memory = "6XiB"`,
		"[user.ann]\nweight = 65":         "[user.ann]: weight = 65: want 1 to 64",
		"[account.a]\npercent = 101":      "[account.a]: percent = 101: want 1 to 100",
		"[account.a]\nmemory = 5":         "cannot decode",
		"[users.ann]\nmemory = \"1GiB\"":  "there is no such key",
		"[everyone]\nmemory = \"-1GiB\"":  "memory",
		"[everyone\nmemory = \"1GiB\"":    "expected",
		"without = \"hide\"\nwithout = 1": "",
	} {
		if _, err := parse("f", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slurm.toml")
	if p, err := Load(path); err != nil || p.Without != Hide || p.GPUs != ByNode {
		t.Errorf("without a file: %+v, %v", p, err)
	}
	if err := os.WriteFile(path, []byte(example), 0o644); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		if p, err := Load(path); err != nil || p.Without != Refuse {
			t.Errorf("%+v, %v", p, err)
		}
		if err := os.Chown(path, 1, 0); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string) {
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), "want a file of root's") {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused("another's file")
	if os.Getuid() != 0 {
		return
	}
	for what, change := range map[string]error{"writable": os.Chown(path, 0, 0), "for all": os.Chmod(path, 0o666)} {
		if change != nil {
			t.Fatal(what, change)
		}
	}
	refused("a file that all may write")
	if err := os.Chmod(path, 0o664); err != nil {
		t.Fatal(err)
	}
	refused("a file that a group may write")
}

func TestAdmit(t *testing.T) {
	p, err := parse("f", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	everyone, ann, physics := ledger.Budget{Owner: "user:2", Memory: 5 * quota.GiB}, ledger.Budget{Owner: "user:1", Memory: 8 * quota.GiB},
		ledger.Budget{Owner: "account:physics", Memory: 12 * quota.GiB}
	for _, c := range []struct {
		name    string
		who     Who
		q       quota.Quota
		budgets []ledger.Budget
		percent int
		refused string
	}{
		{"one of everyone", Who{UID: 2, User: "bob", Account: "art"}, quota.Quota{}, []ledger.Budget{everyone}, 0, ""},
		{"a user without a name", Who{UID: 2}, quota.Quota{Slice: quota.Slice{Share: quota.Share{Percent: 100}}},
			[]ledger.Budget{everyone}, 100, ""},
		{"his own limit, and everyone's weight", Who{UID: 1, User: "ann"}, quota.Quota{Slice: quota.Slice{Share: quota.Share{Weight: 5}}}, nil, 0,
			"--gpu-weight 5: user:1 may have at most 4"},
		{"more time than he may have", Who{UID: 1, User: "ann"}, quota.Quota{Slice: quota.Slice{Share: quota.Share{Percent: 51}}}, nil, 0,
			"--gpu-percent 51: user:1 may have at most 50"},
		{"the limit where none is asked for", Who{UID: 1, User: "ann"}, quota.Quota{Slice: quota.Slice{Share: quota.Share{Weight: 4}}},
			[]ledger.Budget{ann}, 50, ""},
		{"the least of several", Who{UID: 1, User: "ann", Account: "physics"}, quota.Quota{}, []ledger.Budget{ann, physics}, 40, ""},
		{"as much as he may have", Who{UID: 1, User: "ann"}, quota.Quota{Slice: quota.Slice{Share: quota.Share{Percent: 50}}},
			[]ledger.Budget{ann}, 50, ""},
		{"his account's time", Who{UID: 2, User: "bob", Account: "physics"}, quota.Quota{Slice: quota.Slice{Share: quota.Share{Percent: 41}}},
			nil, 0,
			"account:physics may have at most 40"},
	} {
		owners, budgets, err := p.Admit(c.who, &c.q)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%s: got %v, want %q", c.name, err, c.refused)
			}
			continue
		}
		if diff := cmp.Diff(c.budgets, budgets); err != nil || diff != "" || c.q.Percent != c.percent || len(owners) != 2 {
			t.Errorf("%s: %v, %v, %d percent\n%s", c.name, err, owners, c.q.Percent, diff)
		}
	}
}
