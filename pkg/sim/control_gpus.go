// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/hex"
	"fmt"
	"strings"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// maxGPUs is NV_MAX_DEVICES.
const maxGPUs = 32

// uuidBytes decodes "GPU-" and 32 hexadecimal digits with dashes.
func uuidBytes(uuid string) ([]byte, error) {
	b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(uuid, "GPU-"), "-", ""))
	if err != nil || len(b) != 16 || !strings.HasPrefix(uuid, "GPU-") {
		return nil, fmt.Errorf("UUID %q: want GPU- and 32 hexadecimal digits with dashes", uuid)
	}
	return b, nil
}

// putUUID writes a UUID as text with its NUL, or in binary when bits 1:0 of flags are 2, and returns the length.
func putUUID(dst []byte, g *gpu, flags uint32) uint32 {
	if flags&3 == 2 {
		b, _ := uuidBytes(g.UUID) // checked in New
		return uint32(copy(dst, b))
	}
	return uint32(copy(dst, g.UUID+"\x00"))
}

func putString(dst []byte, s string) {
	clear(dst)
	if len(dst) > 0 {
		copy(dst[:len(dst)-1], s)
	}
}

func (c *controlCall) putIDs(dst []byte) {
	for i := range rm.GPUIDListLen {
		id := uint32(rm.GPUIDUnused)
		if i < len(c.d.gpus) {
			id = c.d.gpus[i].id
		}
		rm.PutU32(dst, 4*i, id)
	}
}

func (c *controlCall) attachedIDs() uint32 {
	c.putIDs(c.p)
	return rm.StatusOK
}

func (c *controlCall) probedIDs() uint32 {
	c.putIDs(c.p)
	for off := 4 * rm.GPUIDListLen; off < len(c.p); off += 4 {
		rm.PutU32(c.p, off, rm.GPUIDUnused) // excluded GPUs, and since 580 a third list
	}
	return rm.StatusOK
}

func (c *controlCall) deviceIDs() uint32 {
	rm.PutU32(c.p, 0, uint32(1)<<len(c.d.gpus)-1)
	return rm.StatusOK
}

func (c *controlCall) attachIDs() uint32 {
	rm.PutU32(c.p, rm.GPUIDFailedID, rm.GPUIDUnused)
	for i := range rm.GPUIDListLen {
		id := rm.U32(c.p, 4*i)
		if id == rm.GPUIDUnused || i == 0 && id == rm.GPUIDAttach {
			break
		}
		if g, _ := c.d.byID(id); g == nil {
			rm.PutU32(c.p, rm.GPUIDFailedID, id)
			return rm.StatusInvalidArgument
		}
	}
	return rm.StatusOK
}

func (c *controlCall) active() uint32 {
	n := 0
	for _, g := range c.d.gpus {
		off := rm.ActiveDevicesList + n*rm.ActiveDevicesEntry
		if off+rm.ActiveDevicesEntry > len(c.p) {
			break
		}
		rm.PutU32(c.p, off, g.id)
		rm.PutU32(c.p, off+4, rm.GPUIDUnused)
		rm.PutU32(c.p, off+8, rm.GPUIDUnused)
		n++
	}
	rm.PutU32(c.p, rm.ActiveDevicesCount, uint32(n))
	return rm.StatusOK
}

// idInfo and idInfoV2 differ in the name pointer at 16 of the first.
func (c *controlCall) idInfo() uint32   { return c.putIDInfo(24) }
func (c *controlCall) idInfoV2() uint32 { return c.putIDInfo(16) }

func (c *controlCall) putIDInfo(tail int) uint32 {
	g, instance := c.d.byID(rm.U32(c.p, 0))
	if g == nil {
		return rm.StatusInvalidArgument
	}
	rm.PutU32(c.p, 4, 0)                     // gpuFlags
	rm.PutU32(c.p, 8, uint32(instance))      // deviceInstance
	rm.PutU32(c.p, 12, 0)                    // subDeviceInstance
	rm.PutU32(c.p, tail, 0)                  // sliStatus
	rm.PutU32(c.p, tail+4, g.id)             // boardId
	rm.PutU32(c.p, tail+8, uint32(instance)) // gpuInstance
	rm.PutU32(c.p, tail+12, rm.GPUIDUnused)  // numaId: none
	return rm.StatusOK
}

func (c *controlCall) pciInfo() uint32 {
	g, _ := c.d.byID(rm.U32(c.p, 0))
	if g == nil {
		return rm.StatusInvalidArgument
	}
	rm.PutU32(c.p, 4, g.domain)
	rm.PutU32(c.p, 8, g.bus|g.slot<<16) // two u16
	return rm.StatusOK
}

func (c *controlCall) uuidInfo() uint32 {
	for i, g := range c.d.gpus {
		var want [256]byte
		n := putUUID(want[:], g, rm.U32(c.p, rm.UUIDQueryFlags))
		if string(want[:n]) == string(c.p[:n]) {
			rm.PutU32(c.p, rm.UUIDQueryGPUID, g.id)
			rm.PutU32(c.p, rm.UUIDQueryGPUID+4, uint32(i))
			rm.PutU32(c.p, rm.UUIDQueryGPUID+8, 0)
			return rm.StatusOK
		}
	}
	return rm.StatusObjectNotFound
}

func (c *controlCall) uuidFromID() uint32 {
	g, _ := c.d.byID(rm.U32(c.p, 0))
	if g == nil {
		return rm.StatusInvalidArgument
	}
	clear(c.p[8:264])
	rm.PutU32(c.p, 264, putUUID(c.p[8:264], g, rm.U32(c.p, 4)))
	return rm.StatusOK
}

func (c *controlCall) name() uint32 {
	if rm.U32(c.p, 0) != 0 {
		return rm.StatusNotSupported // unicode
	}
	putString(c.p[4:], c.object.gpu.Name)
	return rm.StatusOK
}

func (c *controlCall) gid() uint32 {
	clear(c.p[12:])
	rm.PutU32(c.p, 8, putUUID(c.p[12:], c.object.gpu, rm.U32(c.p, 4)))
	return rm.StatusOK
}

// cardInfo is CARD_INFO: an array as long as the caller likes, too short is an error (nvidia_read_card_info).
func (r *request) cardInfo() syscall.Errno {
	out := r.call.Outer
	if r.f.kind != Control || len(out)/rm.CardInfoSize < len(r.d.gpus) {
		return syscall.EINVAL
	}
	clear(out)
	for i, g := range r.d.gpus {
		e := out[i*rm.CardInfoSize:]
		e[rm.CardInfoValid] = 1
		rm.PutU32(e, rm.CardInfoDomain, g.domain)
		e[rm.CardInfoBus], e[rm.CardInfoSlot] = byte(g.bus), byte(g.slot)
		rm.PutU32(e, rm.CardInfoVendor, 0x10de|0x1eb8<<16) // NVIDIA, Tesla T4
		rm.PutU32(e, rm.CardInfoGPUID, g.id)
		rm.PutU64(e, rm.CardInfoFBSize, 256<<20)
		rm.PutU32(e, rm.CardInfoMinor, uint32(g.Minor))
	}
	return 0
}

// attachGPUs is ATTACH_GPUS_TO_FD: once per file.
func (r *request) attachGPUs() syscall.Errno {
	out := r.call.Outer
	if r.f.kind != Control || len(out) == 0 || len(out)%4 != 0 || r.f.attached {
		return syscall.EINVAL
	}
	for off := 0; off < len(out); off += 4 {
		if id := rm.U32(out, off); id != 0 {
			if g, _ := r.d.byID(id); g == nil {
				return syscall.EINVAL
			}
		}
	}
	r.f.attached = true
	return 0
}

// registerFD lends the identity of an nvidiactl file (its FileID stands for the descriptor) to this file.
func (r *request) registerFD() syscall.Errno {
	if len(r.call.Outer) != rm.RegisterFDSize || r.f.identity != nil {
		return syscall.EINVAL
	}
	ctl := r.d.files[FileID(rm.U32(r.call.Outer, rm.RegisterFDFD))]
	if ctl == nil || ctl.session != r.s.id || ctl.kind != Control {
		return syscall.EINVAL
	}
	r.f.identity = ctl
	return 0
}

// statusCode is STATUS_CODE: known by domain, bus and slot.
func (r *request) statusCode() syscall.Errno {
	out := r.call.Outer
	if len(out) != rm.StatusCodeSize || r.f.kind != Control {
		return syscall.EINVAL
	}
	for _, g := range r.d.gpus {
		if g.domain == rm.U32(out, rm.StatusCodeDomain) && byte(g.bus) == out[rm.StatusCodeBus] && byte(g.slot) == out[rm.StatusCodeSlot] {
			rm.PutU32(out, rm.StatusCodeStatus, rm.StatusOK)
			return 0
		}
	}
	return syscall.EINVAL
}
