// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps/mpstest"
	"github.com/opencgpu/cgpu/pkg/page"
)

// asDaemon has this program stand for nvidia-cuda-mps-control.
const (
	asDaemon = "CGPU_TEST_MPS"
	asStuck  = "CGPU_TEST_MPS_STUCK" // one whose server does not answer
	asFault  = "CGPU_TEST_MPS_FAULT" // one whose server takes no more clients
	// asHolding is one whose clients go on.
	asHolding = "CGPU_TEST_MPS_HOLDING"

	asConfined = "confined" // an argument: what follows is to be confined
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 2 && os.Args[1] == asConfined:
		fmt.Fprintln(os.Stderr, Confine(os.Args[2:]))
		os.Exit(4)
	case os.Getenv(asDaemon) == "":
		os.Exit(m.Run())
	}
	serve := tellPercent
	if os.Getenv(asHolding) != "" {
		serve = holdOn
	}
	d := &mpstest.Daemon{Server: serve, Stuck: os.Getenv(asStuck) != "", Fault: os.Getenv(asFault) != ""}
	if err := mpstest.Program(os.Args[1:], d); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
}

// tellPercent is an MPS server: it tells a client its part.
func tellPercent(c *net.UnixConn, percent string) {
	_, _ = c.Write([]byte(percent))
	_ = c.Close()
}

// running is a server that has its r.socket, or has ended.
type running struct {
	socket string
	cancel func()
	ended  chan error
}

func (r *running) stop() error {
	r.cancel()
	return <-r.ended
}

func started(t *testing.T, command ...string) *running {
	t.Helper()
	t.Setenv(asDaemon, "1")
	t.Setenv("GORACE", "atexit_sleep_ms=0") // a second for each command, with the race detector
	dir := t.TempDir()
	s := Server{Own: filepath.Join(dir, "daemon"), Command: command, Confine: []string{os.Args[0], asConfined}, patience: time.Minute,
		Narrow: func() error { return nil }} // it would be this process'
	if os.Getenv(asStuck)+os.Getenv(asFault) != "" {
		s.patience, s.look = time.Second, 100*time.Millisecond
	}
	if err := os.Mkdir(s.Own, 0o755); err != nil {
		t.Fatal(err)
	}
	members := filepath.Join(dir, "seats")
	s.Parts, s.Sockets = gateFiles(t, members)
	all := page.Seat(members, 1)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	r := &running{socket: filepath.Join(all, SocketName), cancel: cancel, ended: make(chan error, 1)}
	go func() { r.ended <- s.Run(ctx) }()
	for range 1000 {
		if answers(r.socket) {
			return r
		}
		select {
		case err := <-r.ended:
			r.ended <- err
			return r
		case <-time.After(10 * time.Millisecond):
		}
	}
	t.Fatal("no socket")
	return nil
}

// gateFiles are sockets below a folder, and a file beside it where seat 1 has all, which have come through another socket.
func gateFiles(t *testing.T, members string) (parts *os.File, sockets []*os.File) {
	t.Helper()
	list := make([]byte, page.Seats+1)
	list[1] = page.AllParts
	path := filepath.Join(filepath.Dir(members), page.Parts)
	if err := os.WriteFile(path, list, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ends[1])
	fds := []int{int(file.Fd())}
	for seat := range page.Seats + 1 {
		dir := page.Seat(members, seat)
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		err = errors.Join(err, os.MkdirAll(dir, 0o755), unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, SocketName)}))
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		fds = append(fds, fd)
	}
	if err := errors.Join(unix.Sendmsg(ends[0], []byte{0}, unix.UnixRights(fds...), nil, 0), unix.Close(ends[0])); err != nil {
		t.Fatal(err)
	}
	if parts, sockets, err = Receive(ends[1]); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Receive(ends[1]); err == nil {
		t.Error("sockets out of nothing")
	}
	return parts, sockets
}

// answers reports that somebody listens.
func answers(socket string) bool {
	c, err := net.DialUnix(network, nil, &net.UnixAddr{Name: socket, Net: network})
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

// ownOf is the daemon's folder, by the gate's socket.
func ownOf(socket string) string { return filepath.Join(filepath.Dir(membersOf(socket)), "daemon") }

func membersOf(socket string) string { return filepath.Dir(filepath.Dir(socket)) }

func TestServer(t *testing.T) {
	r := started(t, os.Args[0], "-f")
	c, err := mpstest.Client(r.socket)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if _, err := mpstest.Command(r.socket, "quit"); err == nil {
		t.Error("a member has commanded the daemon")
	}
	if c, err = mpstest.Client(r.socket); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if err := r.stop(); err != nil {
		t.Errorf("the daemon ended by %v: want quit", err)
	}
	for seat := range page.Seats + 1 {
		if answers(filepath.Join(page.Seat(membersOf(r.socket), seat), SocketName)) {
			t.Errorf("the socket of seat %d answers", seat)
		}
	}
	log, err := os.ReadFile(filepath.Join(ownOf(r.socket), "daemon.log"))
	if err != nil || !strings.Contains(string(log), `refused process`) {
		t.Errorf("the log has %q, %v", log, err)
	}
}

// TestParts: a member has the part that the file says of its seat when it comes, whoever came before or comes at the same time.
func TestParts(t *testing.T) {
	r := started(t, os.Args[0], "-f")
	for i, percent := range []int{100, 30, 30, 1, 100, 99} {
		seat := 1 + i%2
		r.set(t, seat, percent)
		if got, err := partOf(r.socket, seat); err != nil || got != strconv.Itoa(percent) {
			t.Errorf("%d: %q, %v", percent, got, err)
		}
	}
	for seat := 1; seat <= 4; seat++ {
		r.set(t, seat, 25*seat)
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			seat := i%4 + 1
			if got, err := partOf(r.socket, seat); err != nil || got != strconv.Itoa(25*seat) {
				t.Errorf("seat %d at once: %q, %v", seat, got, err)
			}
		})
	}
	all.Wait()
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// TestNoPart: who has none gets nothing, and neither does he who looks whether the server answers, or anybody whose part cannot be read.
func TestNoPart(t *testing.T) {
	r := started(t, os.Args[0], "-f")
	for _, seat := range []int{0, 2, page.Seats} {
		if got, err := partOf(r.socket, seat); err == nil {
			t.Errorf("seat %d has a part of %q", seat, got)
		}
	}
	r.set(t, 2, page.AllParts+1)
	if got, err := partOf(r.socket, 2); err == nil {
		t.Errorf("a part beyond all: %q", got)
	}
	if err := os.Truncate(partsOf(r.socket), 1); err != nil {
		t.Fatal(err)
	}
	if got, err := partOf(r.socket, 1); err == nil {
		t.Errorf("a file that is cut off: %q", got)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// partsOf is the file of parts, by the gate's socket.
func partsOf(socket string) string { return filepath.Join(filepath.Dir(membersOf(socket)), page.Parts) }

// set has a seat have a part.
func (r *running) set(t *testing.T, seat, percent int) {
	t.Helper()
	f, err := os.OpenFile(partsOf(r.socket), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{byte(percent)}, int64(seat)); err != nil {
		t.Fatal(err)
	}
}

// partOf is what a server tells a client that comes by a seat.
func partOf(socket string, seat int) (string, error) {
	return partBy(filepath.Join(page.Seat(membersOf(socket), seat), SocketName))
}

func partBy(socket string) (string, error) {
	c, err := mpstest.Client(socket)
	if err != nil {
		return "", err
	}
	defer c.Close()
	said := make([]byte, 64)
	n, err := c.Read(said)
	return string(said[:n]), err
}

// holdOn is an MPS server that says its part to a client, and hears it until it ends.
func holdOn(c *net.UnixConn, percent string) {
	_, _ = c.Write([]byte(percent))
	_, _ = c.Read(make([]byte, 1))
	_ = c.Close()
}

// TestEnd: root has a seat's clients end, by their processes; those of another seat stay, and nobody else can say it.
func TestEnd(t *testing.T) {
	t.Setenv(asHolding, "1")
	r := started(t, os.Args[0], "-f")
	c, err := mpstest.Client(r.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	part := make([]byte, 8)
	if _, err := c.Read(part); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		by   int
		word string
		seat int
		done bool
		ends bool
	}{
		{1, endSeat, 1, false, false}, {0, "quit", 1, false, false}, {0, endSeat + " ", 1, false, false}, {0, newSeat, 1, false, false},
		{0, endSeat, 0, false, false}, {0, endSeat, page.Seats + 1, false, false}, {0, endSeat, 2, true, false}, {0, endSeat, 1, true, true},
	} {
		err := say(t, r.socket, test.by, test.word, test.seat)
		if (err == nil) != test.done {
			t.Errorf("by seat %d, %q %d: %v", test.by, test.word, test.seat, err)
		}
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if test.ends {
			_ = c.SetReadDeadline(time.Now().Add(patience))
		}
		if _, err := c.Read(part); errors.Is(err, os.ErrDeadlineExceeded) == test.ends {
			t.Errorf("by seat %d, %q %d: the client reads %v", test.by, test.word, test.seat, err)
		}
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// say says something to the gate by a seat.
func say(t *testing.T, socket string, by int, word string, seat int) error {
	t.Helper()
	path := filepath.Join(page.Seat(membersOf(socket), by), SocketName)
	c, err := net.DialUnix(network, nil, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	return order(c, word, seat)
}

// TestStuck: a server that waits for a silent client for ever is ended, and who ends it says why.
func TestStuck(t *testing.T) {
	t.Setenv(asStuck, "1")
	r := started(t, os.Args[0], "-f")
	c, err := mpstest.Dial(r.socket, mpstest.AsClient)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	select {
	case err := <-r.ended:
		if err == nil || !strings.Contains(err.Error(), "the MPS server does not answer") {
			t.Errorf("ended by %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	log, err := os.ReadFile(filepath.Join(ownOf(r.socket), "daemon.log"))
	who := fmt.Sprintf("process %d ", os.Getpid())
	if err != nil || !strings.Contains(string(log), who) || !strings.Contains(string(log), "has not spoken with the server") {
		t.Errorf("the log has %q, %v", log, err)
	}
}

// TestWatch: a server that hangs or is in FAULT is ended also where nobody comes, and says why.
func TestWatch(t *testing.T) {
	for how, want := range map[string]string{
		asStuck: "the MPS server does not answer (get_server_",
		asFault: "the MPS server takes no more clients (FAULT)",
	} {
		t.Run(how, func(t *testing.T) {
			t.Setenv(how, "1")
			r := started(t, os.Args[0], "-f")
			select {
			case err := <-r.ended:
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("ended by %v, want %s", err, want)
				}
			case <-time.After(time.Minute):
				t.Fatal("it goes on")
			}
		})
	}
}

func TestNoDaemon(t *testing.T) {
	for _, test := range []struct {
		command []string
		want    string
	}{
		{[]string{"/no/such/nvidia-cuda-mps-control", "-f"}, "it comes with the driver"},
		{[]string{os.Args[0], "-x"}, "ended before it had its socket control: exit status 3"},
	} {
		r := started(t, test.command...)
		if err := r.stop(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v, want %q", test.command, err, test.want)
		}
	}
}

// A daemon that ends takes the gate along, with how it ended.
func TestDaemonEnds(t *testing.T) {
	r := started(t, "sh", "-c", `exec 3<&0; "$0" -f & while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/go" ]; do sleep 0.05; done; kill $!; exit 7`,
		os.Args[0])
	if err := os.WriteFile(filepath.Join(ownOf(r.socket), "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 500 {
		if !answers(r.socket) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	exit, ok := errors.AsType[*exec.ExitError](<-r.ended)
	if !ok || exit.ExitCode() != 7 {
		t.Errorf("ended by %v, want exit status 7", exit)
	}
}

// A daemon for all users is root in a user namespace; one for its own user is in none.
func TestUsers(t *testing.T) {
	one, all := Server{Command: []string{"d", "-f"}}, Server{Command: []string{"d", "-f", forAll}}
	if a := one.attributes(); one.user() != os.Geteuid() || a.Cloneflags != 0 || a.Pdeathsig != syscall.SIGKILL {
		t.Errorf("for one: user %d, %+v", one.user(), a)
	}
	a := all.attributes()
	want := []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	if all.user() != AnyUser || a.Cloneflags&syscall.CLONE_NEWUSER == 0 || a.Pdeathsig != syscall.SIGKILL ||
		!slices.Equal(a.UidMappings, want) {
		t.Errorf("for all: user %d, %+v", all.user(), a)
	}
}

func TestDaemonEnvironment(t *testing.T) {
	got := daemonEnvironment([]string{"A=1", "CUDA_MPS_PIPE_DIRECTORY=/x", "CUDA_MPS_LOG_DIRECTORY=/y", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=5"},
		"/own")
	want := []string{"A=1", "CUDA_MPS_PIPE_DIRECTORY=/own", "CUDA_MPS_LOG_DIRECTORY=/own"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestLog: whatever is written, two files of the log are all that there is.
func TestLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := newLog(path, 100, nil)
	if err != nil {
		t.Fatal(err)
	}
	line := func(i int) string { return fmt.Sprintf("line %d\n", i) }
	for i := range 1000 {
		if n, err := l.Write([]byte(line(i))); err != nil || n != len(line(i)) {
			t.Fatal(n, err)
		}
	}
	before, err1 := os.ReadFile(path + ".1")
	now, err2 := os.ReadFile(path)
	if err := errors.Join(err1, err2); err != nil || len(before) > 100 || len(now) > 100 {
		t.Errorf("%d and %d bytes, %v", len(before), len(now), err)
	}
	if all := string(before) + string(now); !strings.HasSuffix(all, line(998)+line(999)) || !strings.Contains(all, line(990)) {
		t.Errorf("the last lines are %q", all)
	}
}

// TestNoFile: who has the server's user may put anything in the place of what the server writes: it waits for nobody, and writes nowhere
// else.
func TestNoFile(t *testing.T) {
	for what, put := range map[string]func(path, elsewhere string) error{
		"a pipe": func(path, _ string) error { return unix.Mkfifo(path, 0o600) },
		"a pipe that somebody holds": func(path, _ string) error {
			err := unix.Mkfifo(path, 0o600)
			if f, e := os.OpenFile(path, os.O_RDWR, 0); e == nil {
				t.Cleanup(func() { f.Close() })
			}
			return err
		},
		"a link": func(path, elsewhere string) error { return os.Symlink(elsewhere, path) },
		"folder": func(path, _ string) error { return os.Mkdir(path, 0o700) },
	} {
		own := t.TempDir()
		elsewhere := filepath.Join(own, "elsewhere")
		log, ended := filepath.Join(own, "log"), filepath.Join(own, page.Ended)
		if err := errors.Join(put(log, elsewhere), put(ended, elsewhere)); err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() {
			Leave(own, errors.New("why"))
			_, err := newLog(log, 100, nil)
			done <- err
		}()
		select {
		case err := <-done:
			if err == nil {
				t.Errorf("%s is taken for the log", what)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: it waits", what)
		}
		if _, err := os.Lstat(elsewhere); err == nil {
			t.Errorf("%s: it writes elsewhere", what)
		}
	}
	own := t.TempDir()
	Leave(own, errors.New("why"))
	if text, err := os.ReadFile(filepath.Join(own, page.Ended)); err != nil || string(text) != "why" {
		t.Errorf("it leaves %q, %v", text, err)
	}
}
