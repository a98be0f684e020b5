// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func (c *controlCall) fbInfoV2() uint32 {
	return c.putFBInfo(c.p[rm.FBInfoList:], rm.U32(c.p, rm.FBInfoCount))
}

func (c *controlCall) fbInfo() uint32 {
	_, list := c.block(c.index, rm.FBInfoV1List)
	return c.putFBInfo(list, rm.U32(c.p, rm.FBInfoV1Count))
}

// putFBInfo answers a list of (index, KiB) pairs. Indices without a meaning here are 0, as for features a card lacks.
func (c *controlCall) putFBInfo(list []byte, count uint32) uint32 {
	if uint64(count)*rm.FBInfoEntry > uint64(len(list)) {
		return rm.StatusInvalidArgument
	}
	g := c.object.gpu
	for i := range int(count) {
		e := list[i*rm.FBInfoEntry:]
		var v quota.Bytes
		switch rm.U32(e, 0) {
		case rm.FBIndexRAMSize, rm.FBIndexTotalRAMSize, rm.FBIndexHeapSize, rm.FBIndexMappableHeapSize, rm.FBIndexUsableRAMSize:
			v = g.Memory
		case rm.FBIndexHeapFree, rm.FBIndexLargestFreeRegion:
			v = g.Memory - g.used
		case rm.FBIndexBAR1Size:
			v = bar1Size
		case rm.FBIndexBAR1Avail, rm.FBIndexBAR1MaxContiguous:
			v = bar1Size - g.bar1
		case rm.FBIndexNUMANode:
			rm.PutU32(e, 4, 0xffffffff)
			continue
		}
		rm.PutU32(e, 4, uint32(v/quota.KiB))
	}
	return rm.StatusOK
}

// exportKey is an exported descriptor: the number means something in its session only.
type exportKey struct {
	session uint64
	key     int32
}

// exportFD ties memory to a descriptor; a descriptor takes one object (_initializeExportObjectFd in os.c).
func (c *controlCall) exportFD() uint32 {
	o := c.client.objects[rm.U32(c.p, rm.ExportFDObject+rm.ExportObjectHandle)]
	key := exportKey{c.s.id, int32(rm.U32(c.p, rm.ExportFDFD))}
	switch {
	case rm.U32(c.p, rm.ExportFDObject+rm.ExportObjectType) != 1, key.key == -1, rm.U32(c.p, rm.ExportFDFlags)&1 != 0:
		return rm.StatusInvalidParameter
	case o == nil:
		return rm.StatusObjectNotFound
	case o.memory == nil:
		return rm.StatusInvalidArgument
	case c.d.exports[key] != nil:
		return rm.StatusInUse
	}
	o.memory.ref()
	c.d.exports[key] = []*memory{o.memory}
	return rm.StatusOK
}

// exportFDs ties several objects to a descriptor, from a position on. Where one is refused that is not the last, others' exports may be
// freed: the driver takes what it has not set of an array for handles (cliresCtrlCmdOsUnixExportObjectsToFd_IMPL). Here they are.
func (c *controlCall) exportFDs() uint32 {
	const list, counts = 76, 2124
	n, first := int(rm.U16(c.p, counts)), int(rm.U16(c.p, counts+2))
	if n > 512 {
		return rm.StatusInvalidParameter
	}
	var ms []*memory
	for i := range n {
		h := rm.U32(c.p, list+4*i)
		if o := c.client.objects[h]; h == 0 {
			ms = append(ms, nil)
		} else if o != nil && o.memory != nil {
			ms = append(ms, o.memory)
		} else {
			if i < n-1 {
				for k := range c.d.exports {
					c.d.closeExport(k)
				}
			}
			return rm.StatusObjectNotFound
		}
	}
	key := exportKey{c.s.id, int32(rm.U32(c.p, 0))}
	held := c.d.exports[key]
	for len(held) < first+n {
		held = append(held, nil)
	}
	for i, m := range ms {
		if m != nil {
			m.ref()
		}
		if old := held[first+i]; old != nil {
			c.d.unref(old)
		}
		held[first+i] = m
	}
	c.d.exports[key] = held
	return rm.StatusOK
}

// importFD makes a handle for the memory behind a descriptor, under the device or parent that the caller names.
func (c *controlCall) importFD() uint32 {
	ms := c.d.exports[exportKey{c.s.id, int32(rm.U32(c.p, rm.ImportFDFD))}]
	if len(ms) == 0 || ms[0] == nil {
		return rm.StatusInvalidParameter
	}
	h := rm.ImportFDObject
	if rm.U32(c.p, h+rm.ExportObjectType) != 1 {
		return rm.StatusInvalidParameter
	}
	parent := c.client.objects[rm.U32(c.p, h+rm.ExportObjectParent)]
	if parent == nil {
		return rm.StatusObjectNotFound
	}
	o := &object{handle: rm.U32(c.p, h+rm.ExportObjectHandle), class: classMemoryLocal, gpu: ms[0].gpu, memory: ms[0]}
	o.memory.ref()
	if st := c.d.place(c.client, parent, o); st != rm.StatusOK {
		c.d.unref(o.memory)
		return st
	}
	rm.PutU32(c.p, h+rm.ExportObjectHandle, o.handle)
	return rm.StatusOK
}

func (d *Driver) closeExport(k exportKey) {
	for _, m := range d.exports[k] {
		if m != nil {
			d.unref(m)
		}
	}
	delete(d.exports, k)
}

func (c *controlCall) setSharePolicy() uint32 {
	return c.client.root.share(c.p)
}

func (c *controlCall) shareObject() uint32 {
	return shareObject(c.client, rm.U32(c.p, 0), c.p[4:])
}
