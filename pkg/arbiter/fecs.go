// SPDX-License-Identifier: Apache-2.0

package arbiter

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// fecsBuffer is a ring of context-switch records that the driver fills (NV_EVENT_BUFFER, class/cl90cd.h): who was switched in
// and out of the graphics engine, with the GPU's clock. The driver moves the records of the GPU's context-switch firmware
// (FECS) into it about every 33 ms (_fecsTimerCallback in fecs_event_list.c), and then wakes us.
//
// The driver tells the processes of all users only to who is an administrator when he binds the buffer, so that takes
// CAP_SYS_ADMIN. Measured on an H200: 0.5 ms to bind, and about 18 µs more for each context switch.
type fecsBuffer struct {
	own    *rmclient.Client
	buffer uint32 // handle
	event  int    // nvidiactl file that becomes readable when there are records
	head   []byte // NV_EVENT_BUFFER_HEADER
	ring   []byte
	get    uint32
	seqno  uint16
	begun  bool
	pipe   [2]int
}

const (
	classEventBuffer    = 0x90cd     // NV_EVENT_BUFFER
	classDeviceless     = 0x90ce     // NV01_MEMORY_DEVICELESS
	controlBindFecs     = 0x20801238 // NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2, ctrl2080gr.h
	controlEnableEvents = 0x90cd0101 // NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS, ctrl90cd.h
	controlUpdateGet    = 0x90cd0102 // NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET
	eventKeepNewest     = 2          // NV_EVENT_BUFFER_FLAG_OVERFLOW_POLICY_KEEP_NEWEST

	// NV_EVENT_BUFFER_ALLOC_PARAMETERS, class/cl90cd.h.
	bufferSize       = 72
	bufferRecordSize = 16
	bufferRecords    = 20
	bufferThreshold  = 36 // recordsFreeThreshold: free records at which the driver wakes us
	bufferNotify     = 40 // notificationHandle
	bufferSubdevice  = 52
	bufferHead       = 60 // hBufferHeader
	bufferRing       = 64 // hRecordBuffer

	// NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS, ctrl2080gr.h.
	bindSize       = 24
	bindBuffer     = 0
	bindRecordSize = 4
	bindDetail     = 8 // levelOfDetail
	bindAllUsers   = 16
	bindReason     = 20
	detailSimple   = 1 // NV2080_CTRL_GR_FECS_BIND_EVTBUF_LOD_SIMPLE: active regions only

	fecsRecords = 4096
	// fecsRecord is NV_EVENT_BUFFER_RECORD_HEADER and NV_EVENT_BUFFER_FECS_RECORD_V2, class/cl90cdfecs.h.
	fecsRecord    = 32
	fecsPayload   = 24
	fecsTag       = 8
	fecsSeqno     = 10
	fecsContext   = 12
	fecsPID       = 16
	fecsTime      = 24
	fecsTagStart  = 6 // NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_START
	fecsTagEnd    = 7
	fecsHeadGet   = 0
	fecsHeadPut   = 4
	fecsHeadPages = 4096

	// NV_MEMORY_ALLOCATION_PARAMS: cached, and read-only for user space, on which the driver insists.
	deviceless        = 128
	attrCached        = 1 << 29 // NVOS32_ATTR_COHERENCY_CACHED
	attr2UserReadOnly = 1 << 22 // NVOS32_ATTR2_PROTECTION_USER_READ_ONLY
	memoryAttr2       = 28
)

// bindFecs makes a ring and binds it to a GPU, with CAP_SYS_ADMIN: to others the driver tells records of nobody, and says nothing.
func bindFecs(own *rmclient.Client, gpu int) (b *fecsBuffer, err error) {
	if admin, err := cap.GetProc().GetFlag(cap.Effective, cap.SYS_ADMIN); err != nil || !admin {
		return nil, fmt.Errorf("without CAP_SYS_ADMIN (%v): the engine must not run with no_new_privs", err)
	}
	b = &fecsBuffer{own: own, event: -1, pipe: [2]int{-1, -1}}
	memory := func(size int) (uint32, error) {
		p := make([]byte, deviceless)
		rm.PutU32(p, rm.MemoryAttr, attrCached)
		rm.PutU32(p, memoryAttr2, attr2UserReadOnly)
		rm.PutU64(p, rm.MemorySize, uint64(size))
		return own.Alloc(own.Handle(), classDeviceless, p)
	}
	head, err := memory(fecsHeadPages)
	if err != nil {
		return nil, err
	}
	ring, err := memory(fecsRecords * fecsRecord)
	if err != nil {
		return nil, err
	}
	if b.event, err = own.OpenEvent(); err != nil {
		return nil, err
	}
	event := b.event
	defer func() {
		if err != nil {
			_ = unix.Close(event)
		}
	}()
	p := make([]byte, bufferSize)
	rm.PutU32(p, bufferRecordSize, fecsRecord)
	rm.PutU32(p, bufferRecords, fecsRecords)
	rm.PutU32(p, bufferThreshold, fecsRecords) // as many as there are: every batch wakes us
	rm.PutU64(p, bufferNotify, uint64(b.event))
	rm.PutU32(p, bufferSubdevice, own.Subdevice(gpu))
	rm.PutU32(p, bufferHead, head)
	rm.PutU32(p, bufferRing, ring)
	if b.buffer, err = own.Alloc(own.Handle(), classEventBuffer, p); err != nil {
		return nil, err
	}
	bind := make([]byte, bindSize)
	rm.PutU32(bind, bindBuffer, b.buffer)
	rm.PutU32(bind, bindRecordSize, fecsPayload)
	rm.PutU32(bind, bindDetail, detailSimple)
	bind[bindAllUsers] = 1
	if s, e := own.Control(own.Subdevice(gpu), controlBindFecs, bind); e != 0 || s != rm.StatusOK {
		return nil, fmt.Errorf("bind context-switch records: %s, errno %d, reason %d", rm.StatusName(s), e, rm.U32(bind, bindReason))
	}
	if b.head, err = own.Map(own.Handle(), head, 0, fecsHeadPages, ""); err != nil {
		return nil, err
	}
	if b.ring, err = own.Map(own.Handle(), ring, 0, fecsRecords*fecsRecord, ""); err != nil {
		return nil, err
	}
	if err := unix.Pipe2(b.pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, fmt.Errorf("pipe: %w", err)
	}
	return b, nil
}

// Enable starts the records.
func (b *fecsBuffer) Enable() error {
	p := make([]byte, 8)
	p[0] = 1
	rm.PutU32(p, 4, eventKeepNewest)
	if s, e := b.own.Control(b.buffer, controlEnableEvents, p); e != 0 || s != rm.StatusOK {
		return fmt.Errorf("enable context-switch records: %s, errno %d", rm.StatusName(s), e)
	}
	return nil
}

func (b *fecsBuffer) put() uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&b.head[fecsHeadPut])).Load()
}

func (b *fecsBuffer) Read(to []sched.Switch) (records []sched.Switch, lost bool) {
	put := b.put()
	if put >= fecsRecords {
		return to, true
	}
	if !b.begun || b.record((b.get+fecsRecords-1)%fecsRecords).seqno() != b.seqno { // the ring has gone round since
		lost, b.get = b.begun, b.oldest(put)
	}
	for b.get != put {
		r := b.record(b.get)
		if seqno := r.seqno(); b.begun && seqno != b.seqno+1 {
			lost = true
		}
		b.begun, b.seqno = true, r.seqno()
		if tag := r[fecsTag]; tag == fecsTagStart || tag == fecsTagEnd {
			to = append(to, sched.Switch{At: time.Duration(rm.U64(r, fecsTime) &^ (1 << 63)), PID: int(rm.U32(r, fecsPID)),
				Context: rm.U32(r, fecsContext), On: tag == fecsTagStart})
		}
		b.get = (b.get + 1) % fecsRecords
	}
	return to, lost
}

// oldest is where the oldest record stands that the driver has not written over. Who stood by has never read, and its ring went round.
func (b *fecsBuffer) oldest(put uint32) uint32 {
	if next := (put + 1) % fecsRecords; rm.U64(b.record(next), fecsTag) != 0 || rm.U64(b.record(next), fecsTime) != 0 {
		return next
	}
	return 0 // it has not gone round
}

type record []byte

func (b *fecsBuffer) record(i uint32) record { return b.ring[i*fecsRecord : (i+1)*fecsRecord] }
func (r record) seqno() uint16               { return binary.LittleEndian.Uint16(r[fecsSeqno:]) }

// Await arms the notification and waits for the next one.
func (b *fecsBuffer) Await() bool {
	p := make([]byte, 8)
	rm.PutU32(p, 0, b.get)
	if s, e := b.own.Control(b.buffer, controlUpdateGet, p); e != 0 || s != rm.StatusOK {
		return false
	}
	if b.put() != b.get {
		return true
	}
	fds := []unix.PollFd{{Fd: int32(b.event), Events: unix.POLLIN | unix.POLLPRI}, {Fd: int32(b.pipe[0]), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, -1); err == unix.EINTR {
			continue
		} else if err != nil {
			return false
		}
		break
	}
	if fds[1].Revents != 0 {
		var drain [16]byte
		_, _ = unix.Read(b.pipe[0], drain[:])
	}
	return fds[0].Revents&(unix.POLLERR|unix.POLLNVAL) == 0
}

func (b *fecsBuffer) Wake() { _, _ = unix.Write(b.pipe[1], []byte{0}) }
