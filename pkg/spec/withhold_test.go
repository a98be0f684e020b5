// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// stopped says whether the filter of containers without a GPU refuses a number.
func stopped(cmd uint32) bool {
	return slices.ContainsFunc(withheld.stop, func(c cube) bool { return c.has(cmd) })
}

// TestWithheld holds the list to the driver's calls, whatever their type and direction, and to those of ordinary programs.
func TestWithheld(t *testing.T) {
	sized := func(nr, size uint32) uint32 { return size<<16 | nr }
	needed := []uint32{
		sized(rm.EscAllocMemory, 56), sized(rm.EscAllocObject, 20), sized(rm.EscFree, 16), sized(rm.EscControl, 32),
		sized(rm.EscAlloc, 32), sized(rm.EscAlloc, 40), sized(rm.EscAlloc, 48), sized(rm.EscDupObject, 28), sized(rm.EscShare, 24),
		sized(rm.EscI2CAccess, 32), sized(rm.EscVidHeapControl, 184), sized(rm.EscAccessRegistry, 72), sized(rm.EscXferCmd, rm.XferSize),
		sized(rm.EscExportDMABuf, 2600), sized(rm.EscExportDMABuf, 2608),
	}
	for _, cmd := range needed {
		if !rm.RMShaped(cmd) {
			t.Errorf("%#x is no call of the driver", cmd)
		}
		for kind := range uint32(256) {
			for direction := range uint32(4) {
				if c := cmd | kind<<8 | direction<<30; !stopped(c) {
					t.Fatalf("%#x passes", c)
				}
			}
		}
	}
	for _, cmd := range []uint32{rm.UVMInitialize, rm.UVMMapExternal, rm.UVMFree, rm.UVMUnmapExternal, rm.UVMAllocDeviceP2P} {
		if !stopped(cmd) {
			t.Errorf("UVM's %#x passes", cmd)
		}
	}
	// All that RM dispatches, with sizes of every driver, but for what only tells, ties files together, or undoes.
	for _, kind := range []uint32{0, 'F', 0xff} { // UVM's calls have none, and RM ignores it
		for nr := range uint32(256) {
			for size := range uint32(1 << 14) {
				if cmd := sized(nr, size) | kind<<8; rm.RMShaped(cmd) && !stopped(cmd) {
					switch nr {
					case rm.EscIdleChannels, rm.EscCardInfo, rm.EscRegisterFD, rm.EscStatusCode, rm.EscCheckVersion, rm.EscAttachGPUs,
						rm.EscQueryIntr, rm.EscUnmapDMA,
						// these for a client of the own process
						rm.EscBindContextDMA, rm.EscFreeOSEvent, rm.EscMapMemory, rm.EscUnmapMemory, rm.EscUpdateMapping:
					default:
						t.Errorf("%s with %d bytes and type %#x passes", rm.EscapeName(nr), size, kind)
					}
				}
			}
		}
	}
	for name, cmd := range ordinary {
		if stopped(cmd) {
			t.Errorf("%s (%#x) is refused", name, cmd)
		}
	}
	// Without a size: what terminals, sockets and framebuffers use.
	for _, kind := range []uint32{'T', 0x89, 'F', 'K', 'V', 'L', 'S', 0xae, 'f', 'd', 'E', 'H'} {
		for nr := range uint32(256) {
			if stopped(kind<<8 | nr) {
				t.Errorf("%#x is refused", kind<<8|nr)
			}
		}
	}
}

// ordinary are calls of other devices whose low byte is one of NVIDIA's.
var ordinary = map[string]uint32{
	"FIONBIO": 0x5421, "TIOCGPTN": 0x80045430, "TIOCSPTLCK": 0x40045431, "TIOCGPTPEER": 0x5441, "TCGETS2": 0x802c542a, "TCSETS2": 0x402c542b,
	"SIOCGIFMTU": 0x8921, "SIOCSIFMTU": 0x8922, "SIOCGIFHWADDR": 0x8927, "SIOCETHTOOL": 0x8946, "SIOCGIFTXQLEN": 0x8942,
	"TUNSETIFF": 0x400454ca, "TUNGETSNDBUF": 0x800454d3, "TUNSETSNDBUF": 0x400454d4, "TUNATTACHFILTER": 0x401054d5, "TUNSETQUEUE": 0x400454d9,
	"TUNSETDEBUG":    0x400454c9,
	"VIDIOC_S_INPUT": 0xc0045627, "VIDIOC_G_EDID": 0xc0285628, "VIDIOC_S_EDID": 0xc0285629, "VIDIOC_S_FREQUENCY": 0x402c5639,
	"VIDIOC_ENUM_FRAMESIZES": 0xc02c564a, "VIDIOC_ENUM_FRAMEINTERVALS": 0xc034564b, "VIDIOC_ENCODER_CMD": 0xc028564d,
	"FBIOGET_VSCREENINFO": 0x4600, "FBIOPUT_VSCREENINFO": 0x4601, "FBIO_WAITFORVSYNC": 0x40044620,
	"DRM_IOCTL_PRIME_HANDLE_TO_FD": 0xc00c642d, "DRM_IOCTL_MODE_RMFB": 0xc00464af, "DRM_IOCTL_XE_GEM_CREATE": 0xc0386441,
	"DRM_IOCTL_I915_GETPARAM": 0xc0106446,
	"KVM_CREATE_VCPU":         0xae41, "KVM_SET_USER_MEMORY_REGION": 0x4020ae46, "KVM_GET_DIRTY_LOG": 0x4010ae42,
	"BTRFS_IOC_QUOTA_CTL": 0xc0109428 &^ (16 << 16), "FICLONE": 0x40049409, "FS_IOC_GETFLAGS": 0x80086601, "FIBMAP": 1, "FIGETBSZ": 2,
	"RNDADDENTROPY": 0x40085203, "PERF_EVENT_IOC_ENABLE": 0x2400, "SG_IO": 0x2285, "BLKGETSIZE64": 0x80081272, "LOOP_CTL_GET_FREE": 0x4c82,
	"UFFDIO_API": 0xc018aa3f, "NS_GET_USERNS": 0xb701, "SNDRV_PCM_IOCTL_PREPARE": 0x4140,
	"SNDRV_PCM_IOCTL_START": 0x4142, "FITRIM": 0xc0185879,
}

// TestWithheldDerived computes withheld.allow from withheld.stop; it prints the list to paste when that has changed.
func TestWithheldDerived(t *testing.T) {
	if allow := smallestCover(others(withheld.stop)); !slices.Equal(allow, withheld.allow) {
		t.Errorf("%d cubes, computed are %d:\n%s", len(withheld.allow), len(allow), covers{allow: allow})
	}
}

// TestWithheldHalves: every number is in exactly one half. Only the bits that some cube looks at count.
func TestWithheldHalves(t *testing.T) {
	var bits []uint32
	var all uint32
	for _, c := range slices.Concat(withheld.stop, withheld.allow) {
		all |= c.mask
		if c.value&^c.mask != 0 {
			t.Errorf("%#v can hold nothing", c)
		}
	}
	for b := uint32(1); b != 0; b <<= 1 {
		if all&b != 0 {
			bits = append(bits, b)
		}
	}
	for i := range uint32(1) << len(bits) {
		var cmd uint32
		for k, b := range bits {
			if i>>k&1 == 1 {
				cmd |= b
			}
		}
		passes := slices.ContainsFunc(withheld.allow, func(c cube) bool { return c.has(cmd) })
		if passes == stopped(cmd) {
			t.Fatalf("%#x: passes %v, is refused %v", cmd, passes, stopped(cmd))
		}
	}
}

func TestWithhold(t *testing.T) {
	const (
		pod      = `"annotations":{"io.kubernetes.cri.container-type":"container"}`
		all      = `{"names":["read","ioctl"],"action":"SCMP_ACT_ALLOW"}`
		admin    = `"process":{"capabilities":{"bounding":["CAP_CHOWN","CAP_SYS_ADMIN"]}}`
		ordinary = `"process":{"capabilities":{"bounding":["CAP_CHOWN"]}}`
	)
	for name, c := range map[string]struct {
		raw  string
		want bool
	}{
		"no profile": {`{` + pod + `,"linux":{}}`, true},
		"null":       {`{` + pod + `,"linux":{"seccomp":null}}`, true},
		"default profile": {`{` + pod + `,` + ordinary +
			`,"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[` + all + `]}}}`, true},
		"kills":                  {`{` + pod + `,"linux":{"seccomp":{"defaultAction":"SCMP_ACT_KILL","syscalls":[` + all + `]}}}`, true},
		"permits":                {`{` + pod + `,"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[` + all + `]}}}`, true},
		"CRI-O":                  {`{"annotations":{"io.kubernetes.cri-o.ContainerType":"container"},"linux":{}}`, true},
		"forbids ioctl":          {`{` + pod + `,"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[]}}}`, false},
		"pause container":        {`{"annotations":{"io.kubernetes.cri.container-type":"sandbox"},"linux":{}}`, false},
		"no pod":                 {`{"linux":{}}`, false},
		"privileged":             {`{` + pod + `,` + admin + `,"linux":{}}`, false},
		"root of its own users":  {`{` + pod + `,` + admin + `,"linux":{"namespaces":[{"type":"mount"},{"type":"user"}]}}`, true},
		"root of all users":      {`{` + pod + `,` + admin + `,"linux":{"namespaces":[{"type":"mount"}]}}`, false},
		"a GPU of somebody else": {`{` + pod + `,"linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}]}}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			raw := []byte(c.raw)
			doc := decode(t, raw)
			edited0, err := Withhold(doc)
			if err != nil || edited0 != c.want {
				t.Fatalf("%v, %v; want %v", edited0, err, c.want)
			}
			if !c.want {
				if name != "forbids ioctl" && string(doc.Encode()) != c.raw {
					t.Errorf("edited: %s", doc.Encode())
				}
				return
			}
			after := *value[edited](t, doc.Encode()).Linux.Seccomp
			for _, cmd := range []uint64{0x5413, 0x5421, 0x4600, 0xc030462b, 0xc020462a, 0xc010582b, 0x30000001, 33, 0xffffffff_c030002b} {
				want := specs.ActAllow
				if stopped(uint32(cmd)) {
					want = specs.ActErrno
				}
				if name == "kills" && want == specs.ActErrno &&
					!slices.Equal(after.actions([6]uint64{3, cmd}), []specs.LinuxSeccompAction{specs.ActErrno}) {
					t.Errorf("%#x is not refused but the default", cmd)
				}
				if got := after.actions([6]uint64{3, cmd}); !slices.Equal(got, []specs.LinuxSeccompAction{want}) {
					t.Errorf("%#x: %v, want %s", cmd, got, want)
				}
			}
			if after.ListenerPath != "" {
				t.Error("there is a listener")
			}
		})
	}
	doc := decode(t,
		[]byte(`{`+pod+
			`,"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":5,"op":"SCMP_CMP_NE"}]}]}}}`))
	if edited, err := Withhold(doc); edited || err == nil || !strings.Contains(err.Error(), "SCMP_CMP_NE") {
		t.Errorf("%v, %v", edited, err)
	}
}

// BenchmarkWithhold is what it costs beside reading and writing the file.
func BenchmarkWithhold(b *testing.B) {
	raw := recorded(b, "cri16-default")
	for b.Loop() {
		doc, err := Decode(raw)
		if err != nil {
			b.Fatal(err)
		}
		if edited, err := Withhold(doc); err != nil || !edited {
			b.Fatal(edited, err)
		}
		doc.Encode()
	}
}
