// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"encoding/json"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// call is struct seccomp_data, as far as the filter may look.
type call struct {
	nr, arch uint32
	request  uint64
}

// verdict runs a program as the kernel would.
func verdict(t *testing.T, program []unix.SockFilter, c call) uint32 {
	t.Helper()
	words := map[uint32]uint32{dataNR: c.nr, dataArch: c.arch, dataRequest: uint32(c.request), dataRequest + 4: uint32(c.request >> 32)}
	var a uint32
	for pc := 0; pc < len(program); pc++ {
		switch i := program[pc]; i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			word, ok := words[i.K]
			if !ok {
				t.Fatalf("instruction %d loads from %d", pc, i.K)
			}
			a = word
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= i.K
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			if a == i.K {
				pc += int(i.Jt)
			} else {
				pc += int(i.Jf)
			}
		case unix.BPF_JMP | unix.BPF_JA:
			pc += int(i.K)
		case unix.BPF_RET | unix.BPF_K:
			return i.K
		default:
			t.Fatalf("instruction %d: code %#x", pc, i.Code)
		}
	}
	t.Fatal("ran over the end")
	return 0
}

// TestFilter calls every number of ioctl in every way that a machine has.
func TestFilter(t *testing.T) {
	for goarch, ways := range map[string]map[string]call{
		"amd64": {
			"x86-64": {nr: 16, arch: unix.AUDIT_ARCH_X86_64}, "x32": {nr: x32 | 514, arch: unix.AUDIT_ARCH_X86_64},
			"x32 bit on a number of x86-64": {nr: x32 | 16, arch: unix.AUDIT_ARCH_X86_64},
			"number of x32 without the bit": {nr: 514, arch: unix.AUDIT_ARCH_X86_64},
			"int 0x80":                      {nr: 54, arch: unix.AUDIT_ARCH_I386},
		},
		"arm64": {"arm64": {nr: 29, arch: unix.AUDIT_ARCH_AARCH64}, "arm": {nr: 54, arch: unix.AUDIT_ARCH_ARM}},
	} {
		program := filter(abis(goarch), rm.TrappedNRs[:])
		if len(program) > unix.BPF_MAXINSNS {
			t.Errorf("%s: %d instructions", goarch, len(program))
		}
		for name, c := range ways {
			for low := range uint64(256) {
				for _, high := range []uint64{0, 0x4600, 0xc0204600, 1 << 40, 0xffffffff_ffffff00} {
					c.request = high | low
					want := uint32(unix.SECCOMP_RET_ALLOW)
					if slices.Contains(rm.TrappedNRs[:], uint8(low)) {
						want = unix.SECCOMP_RET_USER_NOTIF
					}
					if got := verdict(t, program, c); got != want {
						t.Fatalf("%s, %s: ioctl %#x: %#x, want %#x", goarch, name, c.request, got, want)
					}
				}
			}
			// The number of ioctl in one ABI is that of another call in the others.
			for _, nr := range []uint32{0, 1, 15, 17, 28, 30, 53, 55, 513, 515, 435} {
				other := call{nr: nr, arch: c.arch, request: rm.EscAlloc}
				if got := verdict(t, program, other); got != unix.SECCOMP_RET_ALLOW {
					t.Errorf("%s, %s: call %d: %#x", goarch, name, nr, got)
				}
			}
		}
		if got := verdict(t, program, call{nr: 16, arch: unix.AUDIT_ARCH_PPC64}); got != unix.SECCOMP_RET_KILL_PROCESS {
			t.Errorf("%s: foreign architecture: %#x", goarch, got)
		}
	}
}

// TestState holds the message to what the OCI specification calls its parts; the guard reads it as runc's.
func TestState(t *testing.T) {
	text, err := stateOf("run-1", "1", 42, 43)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"ociVersion": "1.0.2", "fds": []any{"seccompFd"}, "pid": 43., "metadata": `{"id":"run-1","nonce":"1"}`,
		"state": map[string]any{"id": "run-1", "status": "creating", "pid": 42.},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s", text)
	}
}
