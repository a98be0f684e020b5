// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rmclient"
)

func openNode(t *testing.T, path string) int {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

func dupFD(t *testing.T, fd int) int {
	t.Helper()
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// unnamed is a driver that needs no names for files.
var unnamed = rmclient.Kernel{}.OpenFile

// pollable is a file that epoll takes, as nvidiactl.
const pollable = "/dev/random"

// TestUnnamedFiles: a file that the driver has no name for is not followed, and not kept open.
func TestUnnamedFiles(t *testing.T) {
	table := &fileTable{self: os.Getpid()}
	for _, kind := range []nodeKind{nodeControl, nodeUVM} {
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		fd := pipe[1]
		refuse := func(got nodeKind, minor int) (uint32, error) {
			if got != kind || minor != 3 {
				t.Errorf("the driver is told of kind %d, minor %d; want %d, 3", got, minor, kind)
			}
			return 0, unix.ENOSPC
		}
		if f, err := table.follow(fd, node{kind, 3}, refuse); f != nil || !errors.Is(err, unix.ENOSPC) || table.count() != 0 {
			t.Errorf("%v, %v, %d files", f, err, table.count())
		}
		f, err := table.follow(fd, node{kind, 3}, func(nodeKind, int) (uint32, error) { return 7, nil })
		if err != nil || f.sim != 7 {
			t.Fatalf("%+v, %v; want the driver's name", f, err)
		}
		table.remove(f)
		unix.Close(fd)
		if n, err := unix.Read(pipe[0], make([]byte, 1)); n != 0 || err != nil {
			t.Errorf("kind %d: %v; the file is still open somewhere", kind, err)
		}
		unix.Close(pipe[0])
	}
}

func TestWeakFiles(t *testing.T) {
	table := &fileTable{self: os.Getpid()}
	a, b := openNode(t, pollable), openNode(t, pollable)
	defer unix.Close(b)
	fa, err := table.follow(a, node{kind: nodeControl}, unnamed)
	if err != nil {
		t.Fatal(err)
	}
	if table.find(b, nodeControl) != nil {
		t.Error("another open file of the same node is taken for it")
	}
	fb, err := table.follow(b, node{kind: nodeControl}, unnamed)
	if err != nil || fb == fa || table.count() != 2 {
		t.Fatalf("%v, %d files", err, table.count())
	}
	d := dupFD(t, a)
	for _, fd := range []int{a, d} {
		if got, err := table.follow(fd, node{kind: nodeControl}, unnamed); got != fa || err != nil {
			t.Errorf("descriptor %d: %p, want %p", fd, got, fa)
		}
	}
	unix.Close(a)
	if dead := table.reap(); len(dead) != 0 || table.find(d, nodeControl) != fa {
		t.Error("a file with a descriptor left is taken for closed")
	}
	// The number of the first descriptor is used again, by another file. A table that compared numbers would be fooled.
	other := openNode(t, pollable)
	defer unix.Close(other)
	if table.find(other, nodeControl) != nil {
		t.Error("a new file at an old number is taken for the old one")
	}
	unix.Close(d)
	if dead := table.reap(); len(dead) != 1 || dead[0] != fa || table.count() != 1 {
		t.Errorf("reaped %d files, %d left", len(dead), table.count())
	}
	if table.find(b, nodeControl) != fb {
		t.Error("the other file is lost")
	}
	table.remove(fb)
	if table.find(b, nodeControl) != nil || table.count() != 0 {
		t.Error("a removed file is found")
	}
}

// TestFileInAnotherProcess: inherited descriptors and ones in flight keep a file.
func TestFileInAnotherProcess(t *testing.T) {
	table := &fileTable{self: os.Getpid()}
	fd := openNode(t, pollable)
	if _, err := table.follow(fd, node{kind: nodeControl}, unnamed); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "100")
	f := os.NewFile(uintptr(dupFD(t, fd)), "f")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	f.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	if len(table.reap()) != 0 {
		t.Fatal("reaped a file that another process has and that is in a socket")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if len(table.reap()) != 0 {
		t.Fatal("reaped a file that is in a socket")
	}
	unix.Close(pair[0])
	unix.Close(pair[1])
	for deadline := time.Now().Add(patience); len(table.reap()) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) { // files in sockets are freed a moment later
			t.Fatal("a file that is closed for good is not reaped")
		}
	}
}

// TestStrongFiles are held by the guard, for nodes that cannot be polled: a regular file stands for nvidia-uvm.
func TestStrongFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "uvm")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	table := &fileTable{self: os.Getpid()}
	fd, other := openNode(t, path), openNode(t, path)
	defer unix.Close(other)
	if _, err := table.follow(fd, node{kind: nodeControl}, unnamed); err == nil || table.count() != 0 {
		t.Error("a file that epoll refuses is followed without being held")
	}
	f, err := table.follow(fd, node{kind: nodeUVM}, unnamed)
	if err != nil {
		t.Fatal(err)
	}
	if table.find(other, nodeUVM) != nil || table.find(fd, nodeUVM) != f {
		t.Error("find")
	}
	unix.Close(fd)
	if len(table.reap()) != 0 {
		t.Error("reaped a file that the guard holds")
	}
	if table.find(f.strong, nodeUVM) != f {
		t.Error("lost")
	}
	held := f.strong
	table.remove(f)
	if _, err := unix.FcntlInt(uintptr(held), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("the descriptor of a removed file: %v", err)
	}
}

func TestClassify(t *testing.T) {
	random, null := openNode(t, "/dev/random"), openNode(t, "/dev/null")
	defer unix.Close(random)
	defer unix.Close(null)
	byRdev := nodeTable{byRdev: map[uint64]node{unix.Mkdev(1, 8): {nodeGPU, 3}}}
	if n, foreign, err := byRdev.classify(random); n != (node{nodeGPU, 3}) || foreign || err != nil {
		t.Errorf("%+v %v %v", n, foreign, err)
	}
	if n, foreign, _ := byRdev.classify(null); n.kind != nodeOther || foreign {
		t.Errorf("%+v %v", n, foreign)
	}
	if _, _, err := byRdev.classify(-1); err == nil {
		t.Error("a bad descriptor has a kind")
	}
	// A GPU that the container was not given. Nothing answers at this node, so it cannot be opened but as a path.
	if os.Getuid() == 0 {
		p := filepath.Join(t.TempDir(), "nvidia7")
		if err := unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(majorNVIDIA, 7))); err != nil {
			testenv.Lacks(t, "%v", err)
		}
		fd, err := unix.Open(p, unix.O_PATH, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if n, foreign, err := byRdev.classify(fd); !foreign || n.kind != nodeOther || err != nil {
			t.Errorf("%+v %v %v", n, foreign, err)
		}
	}
}

// TestProcessHolds finds a file in another process by what it is, not by its number.
func TestProcessHolds(t *testing.T) {
	nodes := &nodeTable{byRdev: map[uint64]node{unix.Mkdev(1, 8): {nodeUVM, 0}}}
	fd, other := openNode(t, pollable), openNode(t, pollable)
	defer unix.Close(fd)
	defer unix.Close(other)
	cmd := exec.Command("sleep", "100")
	f := os.NewFile(uintptr(dupFD(t, fd)), "f")
	cmd.ExtraFiles = []*os.File{f, f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	defer cmd.Wait()
	defer cmd.Process.Signal(syscall.SIGKILL)
	if !hasFile(os.Getpid(), cmd.Process.Pid, fd, nodes) {
		t.Error("not found")
	}
	if hasFile(os.Getpid(), cmd.Process.Pid, other, nodes) {
		t.Error("another open file is taken for it")
	}
	if hasFile(os.Getpid(), 1<<22+1, fd, nodes) {
		t.Error("found in a process that does not exist")
	}
}

// TestRemoveTwice: the descriptor of a file that was let go may be another's by now.
func TestRemoveTwice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "uvm")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	table := &fileTable{self: os.Getpid()}
	fd := openNode(t, path)
	defer unix.Close(fd)
	f, err := table.follow(fd, node{kind: nodeUVM}, unnamed)
	if err != nil {
		t.Fatal(err)
	}
	table.remove(f)
	// Nothing else runs in this test, so the next descriptor takes the number that was given back or a lower one; take all up to it.
	var taken []int
	for len(taken) == 0 || taken[len(taken)-1] < f.strong {
		taken = append(taken, dupFD(t, fd))
	}
	table.remove(f)
	if _, err := unix.FcntlInt(uintptr(f.strong), unix.F_GETFD, 0); err != nil {
		t.Errorf("the second removal closed descriptor %d, which is another's: %v", f.strong, err)
	}
	for _, d := range taken {
		unix.Close(d)
	}
}

// TestSearchBegins: a search begins where the last one ended, and finds the same wherever that is. For the same file it compares once.
func TestSearchBegins(t *testing.T) {
	table := &fileTable{self: os.Getpid()}
	var fds []int
	for range 20 {
		fd := openNode(t, pollable)
		if _, err := table.follow(fd, node{kind: nodeControl}, unnamed); err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	stranger := openNode(t, pollable)
	defer unix.Close(stranger)
	place, _ := table.search(stranger)
	for last := range len(fds) + 2 { // beyond the end: files were forgotten since
		for _, fd := range fds {
			table.last = last
			at, f := table.search(fd)
			if order, e := table.order(fd, table.list[at]); f != table.list[at] || e != 0 || order != kcmpEqual {
				t.Fatalf("begun at %d: %d, %p", last, at, f)
			}
			if table.last != at {
				t.Errorf("found at %d, the next search begins at %d", at, table.last)
			}
		}
		table.last = last
		if at, f := table.search(stranger); f != nil || at != place {
			t.Errorf("begun at %d: a file that is not followed stands at %d, %p; want %d", last, at, f, place)
		}
	}
	for _, fd := range fds { // each is closed while it is where the next search begins
		table.search(fd)
		unix.Close(fd)
		if at, f := table.search(stranger); f != nil || at > len(table.list) {
			t.Fatalf("%d, %p", at, f)
		}
	}
	if len(table.list)+len(table.closed) != len(fds) || len(table.closed) == 0 {
		t.Errorf("%d files, %d of them closed", len(table.list), len(table.closed))
	}
}
