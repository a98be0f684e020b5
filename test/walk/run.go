// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// Options are how a list is carried out.
type Options struct {
	Args, Env []string // of a process, which calls Serve
	Nodes     string   // folder of the device nodes
	// WellFormed leaves out operations on what is not there, because an earlier one was refused.
	WellFormed bool
	// Sync is called after each step, when no call is under way; at the end the processes are gone.
	Sync  func(step int, end bool) error
	Trace io.Writer // every operation with its result; nil: none
	// Patience is how long an answer may take; what takes longer hangs. 0: a minute.
	Patience time.Duration
}

// Stats is what came of a list's operations. Unanswered are calls for which there is no guard any more.
type Stats struct{ Made, Refused, LeftOut, Unanswered int }

// walk is a list while it is carried out: who has what.
type walk struct {
	o        Options
	stats    Stats
	procs    map[int]*process
	kinds    map[int]string // of files
	clients  map[int]*client
	objects  map[[2]int]bool
	dma      map[[3]int]uint64
	uuid     [16]byte
	gpuID    uint32
	instance uint32
}

type client struct {
	handle uint32
	file   int
}

// process is one of the walk's, as its starter sees it.
type process struct {
	pid      int
	control  int // our end of its socket
	ended    chan struct{}
	files    map[int]int
	patience time.Duration

	mu      sync.Mutex
	next    int
	waiting map[int]chan reply
	gone    bool
}

type reply struct {
	response
	file int // that came with it; -1: none
}

// Run carries out a list, and ends the processes.
func Run(ops []Op, o Options) (Stats, error) {
	if o.Patience == 0 {
		o.Patience = time.Minute
	}
	w := &walk{o: o, procs: map[int]*process{}, kinds: map[int]string{}, clients: map[int]*client{}, objects: map[[2]int]bool{},
		dma: map[[3]int]uint64{}}
	// Processes that a process of ours started become ours when that ends.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return w.stats, fmt.Errorf("walk: %w", err)
	}
	err := w.steps(ops)
	for _, p := range w.procs {
		p.kill()
	}
	for _, p := range w.procs {
		<-p.ended
	}
	if err == nil {
		err = w.last()
	}
	if err == nil && o.Sync != nil {
		last := 0
		if len(ops) > 0 {
			last = ops[len(ops)-1].Step
		}
		err = o.Sync(last, true)
	}
	return w.stats, err
}

// last is a process that makes one client and ends. A guard sees the ends of processes that have made a call: what others held on to,
// such as one that was sent a file, it sees to be gone when it looks next.
func (w *walk) last() error {
	const p, f, c = 1 << 20, 1<<20 + 1, 1<<20 + 2
	return w.steps([]Op{
		{Proc: p, Do: "start"},
		{Proc: p, Do: "open", Args: []string{fmt.Sprint("f", f), "ctl"}, Step: 1},
		{Proc: p, Do: "root", Args: []string{fmt.Sprint("f", f), fmt.Sprint("c", c)}, Step: 2},
		{Proc: p, Do: "exit", Step: 3},
	})
}

func (w *walk) steps(ops []Op) error {
	for len(ops) > 0 {
		n := 1
		for n < len(ops) && ops[n].Step == ops[0].Step {
			n++
		}
		if err := w.step(ops[:n]); err != nil {
			return err
		}
		if w.o.Sync != nil {
			if err := w.o.Sync(ops[0].Step, false); err != nil {
				return err
			}
		}
		ops = ops[n:]
	}
	return nil
}

// step begins all operations and then waits for their ends.
func (w *walk) step(ops []Op) error {
	var ends []func() (string, error)
	for _, op := range ops {
		end, err := w.begin(op)
		if err != nil {
			return fmt.Errorf("walk: %v: %w", op, err)
		}
		ends = append(ends, end)
	}
	for i, end := range ends {
		result, err := end()
		if w.o.Trace != nil {
			fmt.Fprintf(w.o.Trace, "%v  # %s\n", ops[i], result)
		}
		if err != nil {
			return fmt.Errorf("walk: %v: %w", ops[i], err)
		}
	}
	return nil
}

func done(result string) func() (string, error) {
	return func() (string, error) { return result, nil }
}

var errHung = errors.New("no answer: the call hangs")

func (w *walk) begin(op Op) (end func() (string, error), err error) {
	if op.Do == "start" {
		return done("ok"), w.start(op.Proc)
	}
	p := w.procs[op.Proc]
	if p == nil {
		w.stats.LeftOut++
		return done("no such process"), nil
	}
	if f, ok := processOps[op.Do]; ok {
		return f(w, p, op)
	}
	build, ok := calls[op.Do]
	if !ok {
		return nil, errors.New("unknown operation")
	}
	r := &refer{w: w, op: op, p: p, ok: true}
	c := build(r)
	if !r.ok && w.o.WellFormed || c.fd < 0 && len(op.Wrong) == 0 {
		w.stats.LeftOut++
		return done("left out"), nil
	}
	q := request{Do: "call", FD: c.fd, Cmd: c.cmd, Outer: c.outer, Blocks: c.blocks}
	for _, wrong := range op.Wrong {
		w.spoil(&q, p, wrong)
	}
	answer := p.ask(q, -1)
	return func() (string, error) {
		a, err := answer()
		if err != nil {
			return "", err
		}
		status := uint32(0)
		if c.status >= 0 {
			status = rm.U32(a.Outer, c.status)
		}
		switch {
		case a.ID == 0:
			return "the process has ended", nil
		case a.Errno == syscall.ENOSYS: // what the kernel says without a guard
			w.stats.Unanswered++
			return "nobody answers", nil
		case a.Errno != 0:
			w.stats.Refused++
			return "errno " + a.Errno.Error(), nil
		case status != rm.StatusOK:
			w.stats.Refused++
			return rm.StatusName(status), nil
		}
		w.stats.Made++
		if c.done != nil && len(a.Outer) == len(c.outer) {
			c.done(a.Outer, a.Blocks)
		}
		return "ok", nil
	}, nil
}

// spoil makes a call slightly wrong.
func (w *walk) spoil(q *request, p *process, wrong string) {
	where, what, _ := strings.Cut(wrong, "=")
	value := w.value(what)
	part, offset, _ := strings.Cut(where, "+")
	off, _ := strconv.Atoi(offset)
	switch {
	case part == "o":
		rm.PutU32(q.Outer, off, uint32(value))
	case part == "b" && len(q.Blocks) > 0:
		rm.PutU32(q.Blocks[0].Data, off, uint32(value))
	case part == "ptr" && len(q.Blocks) > 0:
		q.Blocks[0].Data, q.Blocks[0].Addr = nil, value
	case part == "cmd":
		q.Cmd = uint32(value)
	case part == "xfer":
		q.Xfer = true
	case part == "fd":
		q.FD = int(int32(value))
		if fd, ok := p.files[number(what)]; ok && strings.HasPrefix(what, "f") {
			q.FD = fd
		}
	}
}

// value is a number, or what has one: a client, an object.
func (w *walk) value(s string) uint64 {
	switch {
	case strings.HasPrefix(s, "c"):
		if c := w.clients[number(s)]; c != nil {
			return uint64(c.handle)
		}
		return 0
	case strings.HasPrefix(s, "o"):
		return uint64(handle(number(s)))
	}
	v, _ := strconv.ParseUint(s, 0, 64)
	return v
}

// processOps are the operations that are more, or less, than a call.
var processOps = map[string]func(*walk, *process, Op) (func() (string, error), error){
	// fork NEW: another process with all files of this one
	"fork": func(w *walk, p *process, op Op) (func() (string, error), error) {
		var names, fds []int
		for f, fd := range p.files {
			names, fds = append(names, f), append(fds, fd)
		}
		child, theirs, err := w.newProcess()
		if err != nil {
			return nil, err
		}
		answer := p.ask(request{Do: "fork", Files: fds}, theirs)
		unix.Close(theirs)
		return func() (string, error) {
			a, err := answer()
			if err != nil || a.PID == 0 {
				child.kill()
				return "no child: " + a.Errno.Error(), err
			}
			child.pid = a.PID
			for i, f := range names {
				child.files[f] = controlFD + 1 + i
			}
			w.procs[op.n(0)] = child
			w.stats.Made++
			return "ok", nil
		}, nil
	},
	// exec FILE…: the program anew, with these files only
	"exec": func(w *walk, p *process, op Op) (func() (string, error), error) {
		q, kept := request{Do: "exec"}, map[int]int{}
		for i := range op.Args {
			if fd, ok := p.files[op.n(i)]; ok {
				kept[op.n(i)] = fd
				q.Files = append(q.Files, fd)
			}
		}
		return w.plain(p, q, func(reply) { p.files = kept }), nil
	},
	"exit": func(w *walk, p *process, op Op) (func() (string, error), error) {
		delete(w.procs, op.Proc)
		return w.plain(p, request{Do: "exit"}, func(reply) {}), nil
	},
	"kill": func(w *walk, p *process, op Op) (func() (string, error), error) {
		delete(w.procs, op.Proc)
		p.kill()
		return func() (string, error) {
			<-p.ended
			return "ok", nil
		}, nil
	},
	// open FILE KIND
	"open": func(w *walk, p *process, op Op) (func() (string, error), error) {
		path := filepath.Join(w.o.Nodes, map[string]string{"ctl": "nvidiactl", "uvm": "nvidia-uvm"}[op.arg(1)])
		if op.arg(1) == "gpu" { // the first there is
			gpus, _ := filepath.Glob(path + "/nvidia[0-9]*")
			path = slices.Concat(gpus, []string{path})[0]
		}
		w.kinds[op.n(0)] = op.arg(1)
		return w.plain(p, request{Do: "open", Path: path}, func(a reply) { p.files[op.n(0)] = a.FD }), nil
	},
	// close FILE
	"close": func(w *walk, p *process, op Op) (func() (string, error), error) {
		return w.loses(p, op, "close"), nil
	},
	// park FILE: it stays in a socket that nobody reads
	"park": func(w *walk, p *process, op Op) (func() (string, error), error) {
		return w.loses(p, op, "park"), nil
	},
	// pass FILE TO: to another process, by way of ours
	"pass": func(w *walk, p *process, op Op) (func() (string, error), error) {
		fd, ok := p.files[op.n(0)]
		if !ok {
			return done("left out"), nil
		}
		return w.plain(p, request{Do: "give", FD: fd}, func(a reply) {
			to := w.procs[op.n(1)]
			if a.file < 0 || to == nil {
				return
			}
			if b, err := to.ask(request{Do: "take"}, a.file)(); err == nil && b.ID != 0 {
				if old, ok := to.files[op.n(0)]; ok { // it has the file already
					to.ask(request{Do: "close", FD: old}, -1)()
				}
				to.files[op.n(0)] = b.FD
			}
		}), nil
	},
}

func (w *walk) loses(p *process, op Op, do string) func() (string, error) {
	fd, ok := p.files[op.n(0)]
	if !ok {
		return done("left out")
	}
	delete(p.files, op.n(0))
	return w.plain(p, request{Do: do, FD: fd}, func(reply) {})
}

// plain is a request whose refusal means nothing.
func (w *walk) plain(p *process, q request, then func(reply)) func() (string, error) {
	answer := p.ask(q, -1)
	return func() (string, error) {
		a, err := answer()
		if err != nil {
			return "", err
		}
		if a.file >= 0 {
			defer unix.Close(a.file)
		}
		if a.Errno != 0 {
			return "errno " + a.Errno.Error(), nil
		}
		if a.ID != 0 {
			w.stats.Made++
			then(a)
		}
		return "ok", nil
	}
}

// start starts a process of our own.
func (w *walk) start(n int) error {
	p, theirs, err := w.newProcess()
	if err != nil {
		return err
	}
	defer unix.Close(theirs)
	if p.pid, err = spawn(theirs, nil, w.o.Args, w.o.Env); err != nil {
		return err
	}
	w.procs[n] = p
	return nil
}

// newProcess makes the socket of a process, and listens to it.
func (w *walk) newProcess() (p *process, theirs int, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, err
	}
	p = &process{control: pair[0], patience: w.o.Patience, ended: make(chan struct{}), files: map[int]int{}, waiting: map[int]chan reply{}}
	go p.listen()
	return p, pair[1], nil
}

func (p *process) listen() {
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := unix.Recvmsg(p.control, b, oob, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		p.mu.Lock()
		if err != nil || n == 0 { // it has ended
			p.gone = true
			for _, ch := range p.waiting {
				close(ch)
			}
			p.waiting = nil
			unix.Close(p.control)
			p.mu.Unlock()
			close(p.ended)
			return
		}
		a := reply{file: received(oob[:oobn])}
		_ = json.Unmarshal(b[:n], &a.response)
		ch := p.waiting[a.ID]
		delete(p.waiting, a.ID)
		p.mu.Unlock()
		if ch != nil {
			ch <- a
		}
	}
}

// ask sends a request, with a file if there is one, and returns what waits for the answer, which is empty if the process ends first.
func (p *process) ask(q request, file int) func() (reply, error) {
	ended := func() (reply, error) { return reply{file: -1}, nil }
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return ended
	}
	p.next++
	q.ID = p.next
	b, err := json.Marshal(q)
	if err != nil {
		return func() (reply, error) { return reply{}, err }
	}
	var rights []byte
	if file >= 0 {
		rights = unix.UnixRights(file)
	}
	ch := make(chan reply, 1)
	p.waiting[q.ID] = ch
	if err := unix.Sendmsg(p.control, b, rights, nil, unix.MSG_NOSIGNAL); err != nil {
		delete(p.waiting, q.ID)
		return ended
	}
	return func() (reply, error) {
		select {
		case a, ok := <-ch:
			if !ok {
				return ended()
			}
			return a, nil
		case <-time.After(p.patience):
			return reply{file: -1}, errHung
		}
	}
}

// kill ends a process at once.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.gone:
	case p.pid > 0:
		_ = syscall.Kill(p.pid, syscall.SIGKILL)
	default:
		_ = unix.Shutdown(p.control, unix.SHUT_RDWR)
	}
}

// Reap takes note of the ends of processes; who calls Run does so, since the processes of a walk start others.
func Reap() { go reap() }
