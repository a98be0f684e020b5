// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// profile is linux.seccomp.
type profile specs.LinuxSeccomp

// actions are the different actions of the rules that match a call of ioctl; more than one has no defined winner.
func (p profile) actions(args [6]uint64) []specs.LinuxSeccompAction {
	var found []specs.LinuxSeccompAction
	for _, r := range p.Syscalls {
		if !slices.Contains(r.Names, "ioctl") || r.Action == p.DefaultAction {
			continue
		}
		for _, conds := range alternatives(r) {
			if !slices.ContainsFunc(conds, func(c specs.LinuxSeccompArg) bool { return !holds(c, args) }) && !slices.Contains(found, r.Action) {
				found = append(found, r.Action)
			}
		}
	}
	if found == nil {
		found = []specs.LinuxSeccompAction{p.DefaultAction}
	}
	return found
}

func holds(c specs.LinuxSeccompArg, args [6]uint64) bool {
	a := args[c.Index]
	switch c.Op {
	case specs.OpEqualTo:
		return a == c.Value
	case specs.OpMaskedEqual:
		return a&c.Value == c.ValueTwo
	case specs.OpLessThan:
		return a < c.Value
	case specs.OpNotEqual:
		return a != c.Value
	}
	panic(c.Op)
}

// TestNotifyRecorded compares with profiles that were swept call by call in containers (testdata README of the
// recordings): the same sets of system calls, the same number of rules for ioctl, the same verdicts.
func TestNotifyRecorded(t *testing.T) {
	for _, test := range []struct {
		file string
		set  []uint8
	}{
		{"seccomp-docker20-notify-nr-2b", []uint8{0x2b}},
		{"seccomp-docker20-notify-nr-2b-27-4a-d3", []uint8{0x2b, 0x27, 0x4a, 0xd3}},
	} {
		want := value[profile](t, recorded(t, test.file))
		doc := decode(t, recorded(t, "docker20-plain"))
		if err := notify(doc, coversOf(test.set), want.ListenerPath, want.ListenerMetadata); err != nil {
			t.Fatal(err)
		}
		got := *value[edited](t, doc.Encode()).Linux.Seccomp
		if len(got.Syscalls) != len(want.Syscalls) {
			t.Errorf("%s: %d rules, want %d", test.file, len(got.Syscalls), len(want.Syscalls))
		}
		rest := func(p profile) string {
			b, _ := json.Marshal(slices.DeleteFunc(p.Syscalls, func(r specs.LinuxSyscall) bool { return slices.Equal(r.Names, []string{"ioctl"}) }))
			p.Syscalls = nil
			head, _ := json.Marshal(p)
			return string(head) + string(b)
		}
		sweep(func(args [6]uint64) {
			if g, w := got.actions(args), want.actions(args); !slices.Equal(g, w) {
				t.Fatalf("%s: %#x: %v, want %v", test.file, args[1], g, w)
			}
		})
		if g, w := rest(got), rest(want); g != w {
			t.Errorf("%s:\ngot  %s\nwant %s", test.file, g, w)
		}
	}
}

// sweep calls f with every low byte under a choice of upper parts and file descriptors.
func sweep(f func(args [6]uint64)) {
	for low := range uint64(256) {
		for _, high := range []uint64{0, 0x4600, 0x5400, 0xc0204600, 0xffffffff_c0304600, 1 << 63} {
			for _, fd := range []uint64{0, 3, 50} {
				f([6]uint64{fd, high | low, 0x1000})
			}
		}
	}
}

// TestNotify holds any profile to the contract: what it permitted passes or, where the low byte is trapped, is notified;
// what it forbade stays forbidden; and no call meets two actions.
func TestNotify(t *testing.T) {
	allowAll := `{"names":["read","ioctl","write"],"action":"SCMP_ACT_ALLOW"}`
	rules := func(args string) string {
		return `{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[` + args + `]}`
	}
	for name, seccomp := range map[string]string{
		"none":            `null`,
		"docker":          `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` + allowAll + `]}`,
		"two permissions": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` + allowAll + `,` + allowAll + `]}`,
		"default allow":   `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[` + allowAll + `]}`,
		"default log":     `{"defaultAction":"SCMP_ACT_LOG","syscalls":[]}`,
		"log, allow":      `{"defaultAction":"SCMP_ACT_LOG","syscalls":[` + allowAll + `]}`,
		"trace":           `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_TRACE"}]}`,
		"deny list":       `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ERRNO","args":[{"index":1,"value":21522,"op":"SCMP_CMP_EQ"}]}]}`,
		"by descriptor":   `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` + rules(`{"index":0,"value":10,"op":"SCMP_CMP_LT"}`) + `]}`,
		"one number": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` + rules(`{"index":1,"value":21505,"op":"SCMP_CMP_EQ"}`) + `,` +
			rules(`{"index":1,"value":17963,"op":"SCMP_CMP_EQ"}`) + `]}`,
		"only trapped": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` + rules(`{"index":1,"value":17963,"op":"SCMP_CMP_EQ"}`) + `]}`,
		"masked": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` +
			rules(`{"index":1,"value":65280,"valueTwo":17920,"op":"SCMP_CMP_MASKED_EQ"}`) + `]}`,
		"masked low": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` +
			rules(`{"index":1,"value":15,"valueTwo":11,"op":"SCMP_CMP_MASKED_EQ"}`) + `]}`,
		"same argument": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` +
			rules(`{"index":1,"value":17963,"op":"SCMP_CMP_EQ"},{"index":1,"value":21505,"op":"SCMP_CMP_EQ"}`) + `]}`,
		"with descriptor": `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` +
			rules(`{"index":0,"value":3,"op":"SCMP_CMP_EQ"},{"index":1,"value":17963,"op":"SCMP_CMP_EQ"}`) + `]}`,
		"escaped name":      `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["\u0069octl","ioctl"],"action":"SCMP_ACT_ALLOW"}]}`,
		"kill, conditional": `{"defaultAction":"SCMP_ACT_KILL","syscalls":[` + rules(`{"index":2,"value":4096,"op":"SCMP_CMP_EQ"}`) + `]}`,
	} {
		t.Run(name, func(t *testing.T) {
			raw := []byte(`{"linux":{"seccomp":` + seccomp + `}}`)
			before := profile{DefaultAction: specs.ActAllow}
			if p := value[edited](t, raw).Linux.Seccomp; p != nil {
				before = *p
			}
			doc := decode(t, raw)
			if err := notify(doc, trapped, "/s", "m"); err != nil {
				t.Fatal(err)
			}
			after := *value[edited](t, doc.Encode()).Linux.Seccomp
			if after.ListenerPath != "/s" || after.ListenerMetadata != "m" {
				t.Errorf("listener %q %q", after.ListenerPath, after.ListenerMetadata)
			}
			if before.Syscalls == nil && name == "none" && len(after.Architectures) < 2 {
				t.Errorf("architectures %v: 32-bit programs would be killed", after.Architectures)
			}
			sweep(func(args [6]uint64) {
				want := before.actions(args)
				isTrapped := slices.ContainsFunc(trapped.stop, func(c cube) bool { return c.has(uint32(args[1])) })
				if len(want) == 1 && permits(want[0]) && isTrapped {
					want = []specs.LinuxSeccompAction{specs.ActNotify}
				}
				if got := after.actions(args); !slices.Equal(got, want) {
					t.Fatalf("fd %d, number %#x: %v, want %v", args[0], args[1], got, want)
				}
			})
		})
	}
}

func TestNotifyRefuses(t *testing.T) {
	for seccomp, want := range map[string]string{
		`{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`:                                                                              "forbids ioctl",
		`{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/x"}`:                                                                                                                    "listener of its own",
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read","ioctl"],"action":"SCMP_ACT_ERRNO"}]}`:                                                                      "forbids ioctl",
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALOW"}]}`:                                                                               `syscalls[0]: action "SCMP_ACT_ALOW" is no action`,
		`{"defaultAction":"SCMP_ACT_DENY"}`:                                                                                                                                         `defaultAction "SCMP_ACT_DENY" is no action`,
		`{"defaultAction":"SCMP_ACT_NOTIFY"}`:                                                                                                                                       "listener of its own",
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mount"],"action":"SCMP_ACT_NOTIFY"}]}`:                                                                            "listener of its own",
		`{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":5,"op":"SCMP_CMP_NE"}]}]}`:                           "SCMP_CMP_NE",
		`{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":5,"op":"SCMP_CMP_LT"}]},{"names":["ioctl"],"x":1}]}`: "SCMP_CMP_LT",
	} {
		doc := decode(t, []byte(`{"linux":{"seccomp":`+seccomp+`}}`))
		err := notify(doc, trapped, "/s", "m")
		if err == nil || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v, want %q", seccomp, err, want)
		}
	}
}
