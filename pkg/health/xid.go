// SPDX-License-Identifier: Apache-2.0

package health

import "fmt"

// class is what an Xid says of its GPU.
type class int

const (
	bad     class = iota // the GPU, or the driver's part of it: it gets no new containers
	program              // of the program that ran: its channel ends, and nobody else's
	record               // told for the record; the GPU goes on
)

// xids are the Xids that are not bad, by ranges: names in nverror.h of NVIDIA/open-gpu-kernel-modules (580.142), what to do in NVIDIA's Xid
// catalog. An engine's error belongs to the channel on it, which any tenant can cause: counted as bad, it would let him take the GPU from
// all others. Numbers that nobody knows are bad.
var xids = []struct {
	first, last uint64
	class       class
}{
	{1, 13, program},  // FIFO errors of a channel, 8: it made no progress, 13: graphics engine exception
	{14, 14, record},  // reports that are no error, of displays and of logging
	{16, 16, record},  //
	{19, 19, record},  //
	{20, 22, program}, // video engines, software methods
	{23, 23, record},  //
	// engines, 31: MMU fault, 32: push buffer, 39 to 41: copy engines, 43: reset channel, 45: removed at its program's end
	{24, 45, program},
	{47, 47, program},   // encoder
	{60, 60, program},   // SEC2
	{63, 63, record},    // a row is to be remapped, or a page was retired: the driver goes round it
	{65, 65, program},   // encoder
	{68, 73, program},   // decoder, 69: graphics class, copy engines, encoder
	{75, 77, program},   // copy engines
	{80, 80, program},   // push buffer's checksum
	{81, 81, record},    // VGA
	{82, 86, program},   // JPEG, decoders, copy engine, optical flow
	{87, 87, record},    // telemetry
	{88, 89, program},   // decoders
	{92, 93, record},    // many errors that were corrected; writes to the InfoROM
	{94, 94, program},   // an uncorrectable error that hit one program, which ends
	{96, 105, program},  // decoders, JPEG
	{108, 109, program}, // what a program did to another's memory over NVLink; a context switch that timed out
	{126, 135, program}, // copy engines
	{137, 139, program}, // what a program did over NVLink; DLA, optical flow
	{141, 142, program}, // fast path of a channel, encoder
	{154, 154, record},  // what the driver wants done is another: NVML says what
	{156, 156, record},  // something was retired in time
	{160, 160, record},  // a memory channel, too
	{162, 164, record},  // power smoothing
}

// classOf is what an Xid says of its GPU.
func classOf(xid uint64) class {
	for _, x := range xids {
		if x.first <= xid && xid <= x.last {
			return x.class
		}
	}
	return bad
}

// names of those that are seen.
var names = map[uint64]string{
	46: "the GPU stopped processing", 48: "uncorrectable memory error", 58: "memory interface", 61: "microcontroller breakpoint",
	62: "microcontroller halted",
	64: "a row could not be remapped", 74: "NVLink", 79: "fallen off the bus", 90: "L2 cache",
	95:  "uncorrectable error that hit more than one program",
	110: "security fault", 119: "GSP does not answer", 120: "GSP error", 121: "C2C link", 136: "link training",
	140: "uncorrectable memory error",
	143: "initialization", 155: "NVLink", 157: "a row could not be remapped", 158: "timeout", 167: "PCIe timeout", 168: "less memory",
	171: "uncorrectable DRAM error", 172: "uncorrectable SRAM error", 173: "C2C link",
}

// xidText is an Xid for people.
func xidText(xid uint64) string {
	if name := names[xid]; name != "" {
		return fmt.Sprintf("Xid %d: %s", xid, name)
	}
	return fmt.Sprintf("Xid %d", xid)
}
