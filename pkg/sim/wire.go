// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// The protocol between Conn and Server: frames of a u32 length and that many bytes, little-endian. A request is its
// number (u64), an op (u8) and the op's fields; the answer is the number, an errno (u32) and the op's result. Requests
// of one connection run side by side, so answers come in any order.

// maxFrame bounds a frame; the largest parameter block of RM is 64 KiB.
const maxFrame = 1 << 20

// wireVersion is part of the first frame; both sides are built together and must agree.
const wireVersion = 3

// Operations.
const (
	opHello       = iota // u32 version, u32 count, i32 minors; the first frame
	opOpen               // u8 node, i32 minor → u32 file
	opClose              // u32 file
	opIoctl              // u32 file, i32 pid, i32 tid, call → call
	opCloseExport        // i32 key
	opSnapshot           // → JSON
	opDelay              // JSON
	opSwitches           // i32 minor, u64 since → u64 next, u8 lost, u32 count, switches
	opPending            // i32 minor, u32 count, i32 pids → u8
	opTrouble            // JSON
	opBarrier            // u32 count, u32 files: all others are closed, or nothing: none is; answered when all requests before it are
)

var errFrame = errors.New("sim: malformed frame")

func writeFrame(w io.Writer, b []byte) error {
	if len(b) > maxFrame {
		return fmt.Errorf("sim: frame of %d bytes: want at most %d", len(b), maxFrame)
	}
	// One write: frames of several goroutines must not mix, and it is one system call.
	out := make([]byte, 4, 4+len(b))
	binary.LittleEndian.PutUint32(out, uint32(len(b)))
	_, err := w.Write(append(out, b...))
	return err
}

func readFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, fmt.Errorf("sim: frame of %d bytes: want at most %d", n, maxFrame)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	return b, nil
}

// decoder reads fields off the front of b; after the first short read bad is set and all is zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) next(n int) []byte {
	if n < 0 || n > len(d.b) {
		d.bad, d.b = true, nil
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) u8() uint8 {
	v := d.next(1)
	if v == nil {
		return 0
	}
	return v[0]
}
func (d *decoder) u32() uint32 { return rm.U32(d.next(4), 0) }
func (d *decoder) u64() uint64 { return rm.U64(d.next(8), 0) }

// bytes is a u32 length and that many bytes.
func (d *decoder) bytes() []byte {
	n := d.u32()
	if uint64(n) > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	return d.next(int(n))
}

func appendU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }
func appendBytes(b, v []byte) []byte      { return append(appendU32(b, uint32(len(v))), v...) }

func appendCall(b []byte, c *rm.Call) []byte {
	b = appendU32(b, c.Cmd)
	b = appendBytes(b, c.Outer)
	b = appendU32(b, uint32(len(c.Blocks)))
	for _, k := range c.Blocks {
		b = appendU32(b, uint32(int32(k.In)))
		b = appendU32(b, uint32(k.Off))
		b = appendBytes(b, k.Data)
	}
	return b
}

// maxBlocks is far above what any escape has.
const maxBlocks = 64

func (d *decoder) call() *rm.Call {
	c := &rm.Call{Cmd: d.u32(), Outer: d.bytes()}
	n := d.u32()
	if n > maxBlocks {
		d.bad = true
		return c
	}
	for i := 0; i < int(n) && !d.bad; i++ {
		k := rm.Block{In: int(int32(d.u32())), Off: int(d.u32())}
		k.Data = d.bytes()
		c.Blocks = append(c.Blocks, k)
	}
	return c
}

// appendResult is the part of a call that the driver may have changed.
func appendResult(b []byte, c *rm.Call) []byte {
	b = appendBytes(b, c.Outer)
	for _, k := range c.Blocks {
		b = appendBytes(b, k.Data)
	}
	return b
}

// result copies what appendResult wrote back into the same call.
func (d *decoder) result(c *rm.Call) {
	outer := d.bytes()
	data := make([][]byte, len(c.Blocks))
	for i := range c.Blocks {
		data[i] = d.bytes()
		d.bad = d.bad || len(data[i]) != len(c.Blocks[i].Data)
	}
	if d.bad = d.bad || len(outer) != len(c.Outer); d.bad {
		return
	}
	copy(c.Outer, outer)
	for i := range data {
		copy(c.Blocks[i].Data, data[i])
	}
}

// appendSwitches is the answer to opSwitches; a switch is u64 time, u32 pid, u32 context, u8 on.
func appendSwitches(b []byte, records []sched.Switch, next uint64, lost bool) []byte {
	b = appendU32(append(appendU64(b, next), flag(lost)), uint32(len(records)))
	for _, s := range records {
		b = append(appendU32(appendU32(appendU64(b, uint64(s.At)), uint32(s.PID)), s.Context), flag(s.On))
	}
	return b
}

func (d *decoder) switches() (records []sched.Switch, next uint64, lost bool) {
	next, lost = d.u64(), d.u8() != 0
	for n := d.u32(); n > 0 && !d.bad; n-- {
		records = append(records, sched.Switch{At: time.Duration(d.u64()), PID: int(int32(d.u32())), Context: d.u32(), On: d.u8() != 0})
	}
	return records, next, lost
}

func flag(v bool) byte {
	if v {
		return 1
	}
	return 0
}
