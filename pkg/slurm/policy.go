// SPDX-License-Identifier: Apache-2.0

// Package slurm decides what a step of a Slurm job may have of a node's GPUs: /etc/cgpu/slurm.toml as a value, and what it says about
// one step. The effects are those of cgpu run (cmd/cgpu/slurm.go, package hostrun); docs/slurm.md is for administrators.
package slurm

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/pelletier/go-toml/v2"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// DefaultFile is where the policy is, unless the plugin's line in plugstack.conf names another file.
const DefaultFile = "/etc/cgpu/slurm.toml"

// What a task without --gpu-mem gets.
const (
	Hide   = "hide"   // a /dev without GPUs
	Refuse = "refuse" // it does not start
	Open   = "open"   // the node's /dev
)

// Where the GPU of a slice comes from.
const (
	ByNode = "node" // cgpu's ledger chooses
	ByGres = "gres" // Slurm has allotted it (--gres=gpu:1, --gres=shard:4)
)

// Limits are the most that somebody may have; zero is no limit.
type Limits struct {
	Memory  quota.Bytes // of all his slices on a node together
	Weight  int         // of a slice
	Percent int         // of a slice
}

// Policy is slurm.toml.
type Policy struct {
	Without  string
	GPUs     string
	Everyone Limits            // each user's, where his own do not say otherwise
	Users    map[string]Limits // by name
	Accounts map[string]Limits // all users of an account together
}

// file is slurm.toml as it is written.
type file struct {
	Without  string                `toml:"without"`
	GPUs     string                `toml:"gpus"`
	Everyone fileLimits            `toml:"everyone"`
	Users    map[string]fileLimits `toml:"user"`
	Accounts map[string]fileLimits `toml:"account"`
}

type fileLimits struct {
	Memory  string `toml:"memory"`
	Weight  int    `toml:"weight"`
	Percent int    `toml:"percent"`
}

// maxFile bounds slurm.toml.
const maxFile = 1 << 20

// Load reads the policy. A file that is not there limits nobody and hides GPUs; one that somebody else than root may write is refused.
func Load(path string) (Policy, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return parse(path, nil)
	}
	if err != nil {
		return Policy{}, fmt.Errorf("slurm: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Policy{}, fmt.Errorf("slurm: %w", err)
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok || owner.Uid != 0 || info.Mode().Perm()&0o022 != 0 || !info.Mode().IsRegular() || info.Size() > maxFile {
		return Policy{}, fmt.Errorf("slurm: %s: want a file of root's, of at most %d bytes, that nobody else may write (chown root, chmod 644)",
			path, maxFile)
	}
	text := make([]byte, info.Size())
	if n, err := f.Read(text); err != nil && n != len(text) {
		return Policy{}, fmt.Errorf("slurm: %w", err)
	}
	return parse(path, text)
}

func parse(path string, text []byte) (Policy, error) {
	in := file{Without: Hide, GPUs: ByNode}
	if err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(&in); err != nil {
		if strict, ok := errors.AsType[*toml.StrictMissingError](err); ok {
			return Policy{}, fmt.Errorf("slurm: %s: %s: there is no such key", path, strings.Join(strict.Errors[0].Key(), "."))
		}
		return Policy{}, fmt.Errorf("slurm: %s: %w", path, err)
	}
	p := Policy{Without: in.Without, GPUs: in.GPUs, Users: map[string]Limits{}, Accounts: map[string]Limits{}}
	if p.Without != Hide && p.Without != Refuse && p.Without != Open {
		return p, fmt.Errorf("slurm: %s: without = %q: want %s, %s or %s", path, p.Without, Hide, Refuse, Open)
	}
	if p.GPUs != ByNode && p.GPUs != ByGres {
		return p, fmt.Errorf("slurm: %s: gpus = %q: want %s or %s", path, p.GPUs, ByNode, ByGres)
	}
	var err error
	if p.Everyone, err = in.Everyone.limits(); err != nil {
		return p, fmt.Errorf("slurm: %s: [everyone]: %w", path, err)
	}
	for name, l := range in.Users {
		if p.Users[name], err = l.limits(); err != nil {
			return p, fmt.Errorf("slurm: %s: [user.%s]: %w", path, name, err)
		}
	}
	for name, l := range in.Accounts {
		if p.Accounts[name], err = l.limits(); err != nil {
			return p, fmt.Errorf("slurm: %s: [account.%s]: %w", path, name, err)
		}
	}
	return p, nil
}

func (f fileLimits) limits() (l Limits, err error) {
	l = Limits{Weight: f.Weight, Percent: f.Percent}
	if l.Weight < 0 || l.Weight > quota.MaxWeight {
		return l, fmt.Errorf("weight = %d: want 1 to %d", l.Weight, quota.MaxWeight)
	}
	if l.Percent < 0 || l.Percent > quota.MaxPercent {
		return l, fmt.Errorf("percent = %d: want 1 to %d", l.Percent, quota.MaxPercent)
	}
	if f.Memory == "" {
		return l, nil
	}
	if l.Memory, err = quota.ParseSize(f.Memory); err != nil {
		return l, fmt.Errorf("memory = %q: %w", f.Memory, err)
	}
	return l, nil
}

// Who is whose a step is, as slurmd knows and not as the job's environment says.
type Who struct {
	UID     int
	User    string // empty where no data base knows the user
	Account string
}

// user are the limits of a user: his own before everyone's, key by key.
func (p Policy) user(name string) Limits {
	l, own := p.Everyone, p.Users[name]
	if own.Memory != 0 {
		l.Memory = own.Memory
	}
	if own.Weight != 0 {
		l.Weight = own.Weight
	}
	if own.Percent != 0 {
		l.Percent = own.Percent
	}
	return l
}

// Admit says for whom a slice's memory counts, and how much they may have; and refuses a share of time that is beyond their limits. A
// slice that asks for no percentage gets the limit as one, since without it could take all.
func (p Policy) Admit(who Who, q *quota.Quota) (owners []string, budgets []ledger.Budget, err error) {
	percent := quota.MaxPercent + 1
	for _, of := range []struct {
		owner string
		limit Limits
	}{
		{fmt.Sprintf("user:%d", who.UID), p.user(who.User)},
		{"account:" + who.Account, p.Accounts[who.Account]},
	} {
		owners = append(owners, of.owner)
		if of.limit.Memory != 0 {
			budgets = append(budgets, ledger.Budget{Owner: of.owner, Memory: of.limit.Memory})
		}
		if of.limit.Weight != 0 && q.Weight > of.limit.Weight {
			return nil, nil, fmt.Errorf("--gpu-weight %d: %s may have at most %d", q.Weight, of.owner, of.limit.Weight)
		}
		if of.limit.Percent != 0 && q.Percent > of.limit.Percent {
			return nil, nil, fmt.Errorf("--gpu-percent %d: %s may have at most %d", q.Percent, of.owner, of.limit.Percent)
		}
		if of.limit.Percent != 0 {
			percent = min(percent, of.limit.Percent)
		}
	}
	if q.Percent == 0 && percent <= quota.MaxPercent {
		q.Percent = percent
	}
	return owners, budgets, nil
}
