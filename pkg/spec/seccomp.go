// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// request is the argument of ioctl that holds the request number.
const request = 1

// conditions must all hold.
type conditions []specs.LinuxSeccompArg

// editSeccomp makes the container's seccomp filter hand the driver's escapes to the guard. Where there is no guard the profile stays as
// it is.
func editSeccomp(doc *Document, p *Plan) error {
	switch {
	case p.Socket != "":
	case p.PageWritable && p.Page != "" && p.Limiter != "", p.DriverLimits && !p.PageWritable:
		return nil
	default:
		return errors.New("nobody would hold this container to its quota") // a bug of the caller
	}
	metadata, err := json.Marshal(listenerMetadata{p.ID, p.Nonce})
	if err != nil {
		return err
	}
	return notify(doc, trapped, p.Socket, string(metadata))
}

// listenerMetadata reaches the guard with every listener, in the container process state.
type listenerMetadata struct {
	ID    string `json:"id"`
	Nonce string `json:"nonce"`
}

// notify rewrites linux.seccomp so that an ioctl whose number is in c.stop goes to the listener at socket
// and every other call is treated as before.
//
// Of RM's calls the filter compares arg1 & 0xff only: the driver ignores the type byte and the direction of an ioctl number, and the kernel
// ignores the upper half of the argument, so any stricter comparison could be walked around. UVM compares all of a number. Where the
// profile permits ioctl, the permission is split into disjoint parts, one that passes and one that notifies. What the profile forbids stays
// forbidden: it is not handed to the guard either, which would permit it for files that are not NVIDIA's.
//
// An unconditional permission must go, not stay beside the notification: libseccomp would drop the latter silently.
func notify(doc *Document, c covers, socket, metadata string) error {
	profile, err := doc.profile()
	if err != nil {
		return err
	}
	stopped, err := profile.split(c, specs.LinuxSyscall{Action: specs.ActNotify})
	if err != nil {
		return err
	}
	if !stopped {
		return errors.New("the seccomp profile forbids ioctl, without which no GPU works: use a profile that allows it")
	}
	profile.set("listenerPath", quote(socket))
	profile.set("listenerMetadata", quote(metadata))
	return nil
}

// profile is the container's seccomp profile; a privileged or unconfined container gets one that permits everything.
func (d *Document) profile() (seccomp, error) {
	profile, err := d.within("linux", "seccomp")
	if profile != nil || err != nil {
		return seccomp{profile}, err
	}
	if profile, err = d.must("linux", "seccomp"); err != nil {
		return seccomp{}, err
	}
	profile.set("defaultAction", quote(string(specs.ActAllow)))
	architectures, err := json.Marshal(nativeArchitectures(runtime.GOARCH))
	if err != nil {
		return seccomp{}, err
	}
	profile.set("architectures", architectures)
	return seccomp{profile}, nil
}

// seccomp is linux.seccomp.
type seccomp struct{ *object }

// split puts the action of stop in the place of every permission of an ioctl whose number is in c.stop. False: there was none, and
// the profile is as it was. After an error it is too.
func (profile seccomp) split(c covers, stop specs.LinuxSyscall) (stopped bool, err error) {
	var defaultAction specs.LinuxSeccompAction
	if raw := profile.get("defaultAction"); raw != nil {
		if err := json.Unmarshal(raw, &defaultAction); err != nil {
			return false, fmt.Errorf("defaultAction: %w", err)
		}
	}
	raw, err := elements(profile.get("syscalls"))
	if err != nil {
		return false, fmt.Errorf("syscalls: %w", err)
	}
	if err := knownActions(defaultAction, raw); err != nil {
		return false, err
	}
	if raw := profile.get("listenerPath"); (raw != nil && string(raw) != `""`) || defaultAction == specs.ActNotify {
		return false, errOwnListener
	}
	var kept [][]byte
	var split []specs.LinuxSyscall
	for i := range raw {
		var r specs.LinuxSyscall
		if !speaksOf(raw[i], "ioctl") && !speaksOf(raw[i], string(specs.ActNotify)) {
			kept = append(kept, raw[i]) // decoding all would take the most of the time
			continue
		}
		if err := json.Unmarshal(raw[i], &r); err != nil {
			return false, fmt.Errorf("syscalls[%d]: %w", i, err)
		}
		if r.Action == specs.ActNotify {
			return false, errOwnListener
		}
		if !permits(r.Action) && r.Action != defaultAction && len(r.Args) == 0 && slices.Contains(r.Names, "ioctl") {
			return false, nil // no other rule of ioctl counts beside it
		}
		if !slices.Contains(r.Names, "ioctl") || !permits(r.Action) {
			// A rule that forbids ioctl stays. Where it meets one of ours, either wins, and either is safe.
			kept = append(kept, raw[i])
			continue
		}
		rest, err := withoutIoctl(raw[i])
		if err != nil {
			return false, fmt.Errorf("syscalls[%d]: %w", i, err)
		}
		if rest != nil {
			kept = append(kept, rest)
		}
		if r.Action == defaultAction {
			continue // says nothing; runtimes skip it
		}
		parts, err := splitRule(r, c, stop, permits(defaultAction))
		if err != nil {
			return false, fmt.Errorf("syscalls[%d]: %w", i, err)
		}
		split = append(split, parts...)
	}
	if permits(defaultAction) {
		split = append(split, stops(nil, c, stop)...)
	}
	if !slices.ContainsFunc(split, func(r specs.LinuxSyscall) bool { return r.Action == stop.Action }) {
		return false, nil
	}
	seen := map[string]bool{}
	for _, r := range split {
		if r.Action == specs.ActErrno && defaultAction == specs.ActErrno {
			continue // says nothing, as above
		}
		b, err := json.Marshal(r)
		if err != nil {
			return false, err
		}
		if !seen[string(b)] { // two permissions may have given the same part
			seen[string(b)] = true
			kept = append(kept, b)
		}
	}
	profile.set("syscalls", array(kept))
	return true, nil
}

// knownActions refuses what no low-level runtime knows: it would say so when the container is started, and not always what.
func knownActions(defaultAction specs.LinuxSeccompAction, rules [][]byte) error {
	known := func(action specs.LinuxSeccompAction) bool {
		switch action {
		case specs.ActAllow, specs.ActLog, specs.ActTrace, specs.ActNotify, specs.ActErrno,
			specs.ActKill, specs.ActKillProcess, specs.ActKillThread, specs.ActTrap:
			return true
		}
		return false
	}
	if !known(defaultAction) {
		return fmt.Errorf("defaultAction %.64q is no action of seccomp", defaultAction)
	}
	for i, raw := range rules {
		action, err := unquote(lookup(raw, "action"))
		if err == nil && !known(specs.LinuxSeccompAction(action)) {
			return fmt.Errorf("syscalls[%d]: action %.64q is no action of seccomp", i, action)
		}
	}
	return nil
}

// speaksOf says whether valid JSON can have a text in it, which may be written with escapes.
func speaksOf(raw []byte, text string) bool {
	return bytes.Contains(raw, []byte(text)) || bytes.IndexByte(raw, '\\') >= 0
}

var errOwnListener = errors.New("the seccomp profile notifies a listener of its own, and the kernel allows one for a process: use a " +
	"profile without SCMP_ACT_NOTIFY and listenerPath")

// permits says whether action can let a call through. TRACE does when the tracer, which may be in the container,
// says so.
func permits(action specs.LinuxSeccompAction) bool {
	return action == specs.ActAllow || action == specs.ActLog || action == specs.ActTrace
}

// nativeArchitectures are those that a process can call in on a machine of Go's architecture name goarch. One that is
// missing would have its processes killed on their first system call.
func nativeArchitectures(goarch string) []specs.Arch {
	if goarch == "arm64" {
		return []specs.Arch{specs.ArchAARCH64, specs.ArchARM}
	}
	return []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32}
}

// withoutIoctl takes ioctl out of the names of a rule, nil when no name is left.
func withoutIoctl(raw []byte) ([]byte, error) {
	r, err := parseObject(raw, true)
	if err != nil {
		return nil, err
	}
	names, err := elements(r.get("names"))
	if err != nil {
		return nil, err
	}
	var kept [][]byte
	for _, n := range names {
		name, err := unquote(n)
		if err != nil {
			return nil, err
		}
		if name != "ioctl" {
			kept = append(kept, n)
		}
	}
	if len(kept) == 0 {
		return nil, nil
	}
	r.set("names", array(kept))
	return r.append(nil), nil
}

// splitRule makes the rules that take the place of r, a permission of ioctl. With silent set those that stop are left
// out, because the default action needs them for every ioctl anyway.
func splitRule(r specs.LinuxSyscall, c covers, stop specs.LinuxSyscall, silent bool) ([]specs.LinuxSyscall, error) {
	var parts []specs.LinuxSyscall
	for _, conds := range alternatives(r) {
		for _, cube := range c.allow {
			met, ok, err := conds.meet(cube)
			if err != nil {
				return nil, err
			}
			if ok {
				parts = append(parts, specs.LinuxSyscall{Names: []string{"ioctl"}, Action: r.Action, ErrnoRet: r.ErrnoRet, Args: met})
			}
		}
		if !silent {
			parts = append(parts, stops(conds, c, stop)...)
		}
	}
	return parts, nil
}

// alternatives are the condition sets of which one must hold. Runtimes take two conditions on the same argument in one
// rule as a rule for each condition (runc: libcontainer/seccomp, matchCall).
func alternatives(r specs.LinuxSyscall) []conditions {
	seen := map[uint]bool{}
	for _, c := range r.Args {
		if seen[c.Index] {
			alone := make([]conditions, len(r.Args))
			for i, c := range r.Args {
				alone[i] = conditions{c}
			}
			return alone
		}
		seen[c.Index] = true
	}
	return []conditions{r.Args}
}

// stops are the rules with the action of stop where conds hold and the number is in c.stop.
func stops(conds conditions, c covers, stop specs.LinuxSyscall) []specs.LinuxSyscall {
	var rules []specs.LinuxSyscall
	for _, cube := range c.stop {
		if met, ok, err := conds.meet(cube); ok && err == nil {
			rules = append(rules, specs.LinuxSyscall{Names: []string{"ioctl"}, Action: stop.Action, ErrnoRet: stop.ErrnoRet, Args: met})
		}
	}
	return rules
}

// meet adds to conds that the number is in c; false when nothing is left.
func (conds conditions) meet(c cube) (conditions, bool, error) {
	mask, value := uint64(c.mask), uint64(c.value)
	i := slices.IndexFunc(conds, func(c specs.LinuxSeccompArg) bool { return c.Index == request })
	if i < 0 {
		met := append(slices.Clone(conds), specs.LinuxSeccompArg{Index: request, Value: mask, ValueTwo: value, Op: specs.OpMaskedEqual})
		for j := len(met) - 1; j > 0 && met[j-1].Index > met[j].Index; j-- { // by index, as the others are where it matters
			met[j-1], met[j] = met[j], met[j-1]
		}
		return met, true, nil
	}
	switch own := conds[i]; own.Op {
	case specs.OpEqualTo:
		return conds, c.has(uint32(own.Value)), nil
	case specs.OpMaskedEqual:
		wanted := own.ValueTwo & own.Value
		if (wanted^value)&own.Value&mask != 0 {
			return nil, false, nil
		}
		met := slices.Clone(conds)
		met[i].Value, met[i].ValueTwo = own.Value|mask, wanted|value
		return met, true, nil
	default:
		return nil, false, fmt.Errorf("ioctl is permitted with %s on its number, which cannot be combined with the guard's rules: use %s or %s",
			own.Op, specs.OpEqualTo, specs.OpMaskedEqual)
	}
}
