// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"encoding/json"
	"errors"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// request is what a process is to do; files come and go with the message.
type request struct {
	ID     int
	Do     string // open, close, call, fork, exec, exit, give, take, park
	Path   string `json:",omitempty"`
	FD     int
	Files  []int   `json:",omitempty"`
	Cmd    uint32  `json:",omitempty"`
	Outer  []byte  `json:",omitempty"`
	Blocks []block `json:",omitempty"`
	Xfer   bool    `json:",omitempty"`
}

// block is memory behind a pointer of the outer structure.
type block struct {
	Off  int
	Data []byte `json:",omitempty"`
	Addr uint64 `json:",omitempty"` // without data: this is the pointer
}

type response struct {
	ID     int
	Errno  syscall.Errno
	FD     int      `json:",omitempty"`
	PID    int      `json:",omitempty"`
	Outer  []byte   `json:",omitempty"`
	Blocks [][]byte `json:",omitempty"`
}

const (
	// controlFD is a process' end of the socket by which it is told what to do.
	controlFD = 3
	// execEnv has the number of the request by which a process became this program.
	execEnv = "CGPU_WALK_EXEC"
	// maxMessage holds the parameters of a UVM mapping as JSON, several times.
	maxMessage = 256 << 10
)

// Serve is the life of a process of a walk: it does what it is told by the socket that Run gave it. Every request has a goroutine,
// so that several threads make calls at once.
func Serve() {
	hideFiles()
	go reap()
	if id, err := strconv.Atoi(os.Getenv(execEnv)); err == nil {
		_ = os.Unsetenv(execEnv)
		answer(response{ID: id}, -1)
	}
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := unix.Recvmsg(controlFD, b, oob, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			os.Exit(0) // who started it is gone
		}
		var r request
		if json.Unmarshal(b[:n], &r) != nil {
			os.Exit(1)
		}
		sent := received(oob[:oobn])
		go func() {
			res, give := r.carryOut(sent)
			res.ID = r.ID
			answer(res, give)
		}()
	}
}

// hideFiles keeps what the process has from the programs that it starts; fork and exec name what they are given.
func hideFiles() {
	names, _ := os.ReadDir("/proc/self/fd")
	for _, name := range names {
		if fd, err := strconv.Atoi(name.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

// reap takes note of children that ended.
func reap() {
	ended := make(chan os.Signal, 64)
	signal.Notify(ended, unix.SIGCHLD)
	for range ended {
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

// received is the file that came with a message; -1 if none did.
func received(oob []byte) int {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1
	}
	return fds[0]
}

func answer(r response, give int) {
	b, err := json.Marshal(r)
	if err != nil {
		os.Exit(1)
	}
	var rights []byte
	if give >= 0 {
		rights = unix.UnixRights(give)
	}
	for {
		if err := unix.Sendmsg(controlFD, b, rights, nil, 0); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// carryOut does what was asked, and says which file goes with the answer.
func (r *request) carryOut(sent int) (res response, give int) {
	give = -1
	var err error
	switch r.Do {
	case "open":
		res.FD, err = unix.Open(r.Path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	case "close":
		err = unix.Close(r.FD)
	case "call":
		res = r.call()
		return res, -1
	case "fork":
		res.PID, err = spawn(sent, r.Files, os.Args, os.Environ())
		_ = unix.Close(sent)
	case "exec":
		err = r.exec()
	case "exit":
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // os.Exit waits for a second under the race detector
	case "give":
		give = r.FD
	case "take":
		res.FD = sent
	case "park":
		err = park(r.FD)
	default:
		err = unix.ENOSYS
	}
	if err != nil && !errors.As(err, &res.Errno) {
		res.Errno = unix.EIO
	}
	return res, give
}

// spawn starts the program again, with a control socket and files, which have the next numbers then.
func spawn(control int, files []int, args, env []string) (int, error) {
	list := []uintptr{0, 1, 2, uintptr(control)}
	for _, fd := range files {
		list = append(list, uintptr(fd))
	}
	return syscall.ForkExec("/proc/self/exe", args, &syscall.ProcAttr{Env: env, Files: list})
}

// exec becomes the program anew, with some of the files under their numbers; it answers from there.
func (r *request) exec() error {
	for _, fd := range append(r.Files, controlFD) {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return err
		}
	}
	return syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), execEnv+"="+strconv.Itoa(r.ID)))
}

// park puts a file into a socket that nobody reads; it stays there until the process ends.
func park(fd int) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		return err
	}
	return unix.Close(fd)
}

// call makes an ioctl. What the structure points at lies behind it.
func (r *request) call() response {
	outer := aligned(len(r.Outer))
	copy(outer, r.Outer)
	var keep [][]byte
	for _, b := range r.Blocks {
		addr := b.Addr
		if len(b.Data) > 0 {
			data := aligned(len(b.Data))
			copy(data, b.Data)
			keep = append(keep, data)
			addr = address(data)
		}
		rm.PutU64(outer, b.Off, addr)
	}
	cmd, arg := r.Cmd, outer
	if r.Xfer {
		arg = aligned(rm.XferSize)
		rm.PutU32(arg, rm.XferCmd, cmd&0xff)
		rm.PutU32(arg, rm.XferLength, uint32(len(outer)))
		rm.PutU64(arg, rm.XferPtr, address(outer))
		cmd = escape(rm.EscXferCmd, rm.XferSize)
	}
	errno := syscall.EINTR
	for errno == syscall.EINTR || errno == syscall.EAGAIN {
		_, _, errno = syscall.Syscall(syscall.SYS_IOCTL, uintptr(r.FD), uintptr(cmd), uintptr(unsafe.Pointer(unsafe.SliceData(arg))))
	}
	runtime.KeepAlive(arg)
	runtime.KeepAlive(outer)
	runtime.KeepAlive(keep)
	return response{Errno: errno, Outer: outer, Blocks: keep}
}

// aligned makes memory that begins with a page, as some calls want it.
func aligned(n int) []byte {
	b := make([]byte, n+os.Getpagesize())
	skip := -int(address(b)) & (os.Getpagesize() - 1)
	return b[skip : skip+n]
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// escape is the number of an RM call.
func escape(nr uint32, size int) uint32 { return 3<<30 | uint32(size)<<16 | 'F'<<8 | nr }
