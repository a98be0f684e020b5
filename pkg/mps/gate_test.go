// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps/mpstest"
)

// opened is a gate before a daemon whose server says back what it hears.
type opened struct {
	daemon  mpstest.Daemon
	socket  string // the gate's
	mu      sync.Mutex
	refused []string
	doubts  atomic.Int32 // of the server
}

func open(t *testing.T, user int) *opened {
	t.Helper()
	o := &opened{socket: filepath.Join(t.TempDir(), SocketName)}
	o.daemon.Server = func(c *net.UnixConn, _ string) {
		defer c.Close()
		packet := make([]byte, 64)
		for {
			n, err := c.Read(packet)
			if err != nil {
				return
			}
			_, _ = c.Write(packet[:n])
		}
	}
	own := filepath.Join(t.TempDir(), SocketName)
	serve(t, own, o.daemon.Serve)
	g := &Gate{Daemon: own, User: user, Patience: patience / 2, Refused: func(err error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.refused = append(o.refused, err.Error())
	}}
	g.Prepare = func(int) error { return nil }
	g.Doubt = func(error) { o.doubts.Add(1) }
	serve(t, o.socket, func(l *net.UnixListener) { g.Sit(1, l) })
	return o
}

func serve(t *testing.T, path string, with func(*net.UnixListener)) {
	t.Helper()
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go with(l)
}

// told waits for a refusal.
func (o *opened) told(t *testing.T, want string) {
	t.Helper()
	for range 500 {
		o.mu.Lock()
		told := strings.Join(o.refused, "; ")
		o.mu.Unlock()
		if strings.Contains(told, want) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("refused: %q, want %q", o.refused, want)
}

// works tells whether a client gets through, and speaks with the server.
func (o *opened) works(t *testing.T) {
	t.Helper()
	c, err := mpstest.Client(o.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	packet := make([]byte, 64)
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("work")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(packet); err != nil || string(packet[:n]) != "work" {
		t.Fatalf("the server said %q, %v", packet[:n], err)
	}
}

func TestClients(t *testing.T) {
	o := open(t, os.Geteuid())
	o.works(t)
	var all sync.WaitGroup
	for range mostOfOne {
		all.Go(func() {
			c, err := mpstest.Client(o.socket)
			if err != nil {
				t.Error(err)
				return
			}
			_ = c.Close()
		})
	}
	all.Wait()
	for _, heard := range o.daemon.Heard() {
		if heard != "client" {
			t.Errorf("the daemon heard %q", heard)
		}
	}
}

// A program that looks whether there is a daemon: it is none of the daemon's business, and no refusal.
func TestProbe(t *testing.T) {
	o := open(t, os.Geteuid())
	c := connect(t, o)
	_ = c.Close()
	o.works(t)
	if heard := o.daemon.Heard(); !slices.Equal(heard, []string{"client"}) || o.refused != nil {
		t.Errorf("the daemon heard %q, refused %q", heard, o.refused)
	}
}

// connect connects, and has heard the gate's hello.
func connect(t *testing.T, o *opened) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix(network, nil, &net.UnixAddr{Name: o.socket, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	if _, err := receive(c, hello, 0); err != nil {
		t.Fatal(err)
	}
	return c
}

// Whatever a member says but what libcuda does, the daemon hears nothing of it.
func TestRefused(t *testing.T) {
	word := func(n uint32) string { return string(binary.LittleEndian.AppendUint32(nil, n)) }
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, test := range map[string]struct {
		says []string
		fds  bool // with the first
		want string
	}{
		"a command":              {says: []string{credentials, word(4)}, want: `sent "\x04\x00\x00\x00": want "\x02`},
		"a server":               {says: []string{credentials, word(1)}, want: `sent "\x01\x00`},
		"whatever 3 is":          {says: []string{credentials, word(3)}, want: `sent "\x03\x00`},
		"0":                      {says: []string{credentials, word(0)}, want: `sent "\x00\x00`},
		"a client, and more":     {says: []string{credentials, word(2) + "quit\n"}, want: `sent "\x02\x00\x00\x00q"`},
		"half a word":            {says: []string{credentials, "\x02"}, want: `sent "\x02": want`},
		"both in one":            {says: []string{credentials + word(2)}, want: `OUTBCRED\x00\x02": want`},
		"a command without more": {says: []string{"quit\n"}, want: `sent "quit\n": want "OUTBCRED`},
		"nothing after that":     {says: []string{credentials}, want: "EOF"},
		"the daemon's words":     {says: []string{handed}, want: "OUTBCUFD"},
		"much":                   {says: []string{strings.Repeat("x", 1<<16)}, want: "xxxxxxxxxx"},
		"descriptors":            {says: []string{credentials}, fds: true, want: "sent descriptors"},
	} {
		t.Run(name, func(t *testing.T) {
			o := open(t, os.Geteuid())
			c := connect(t, o)
			for i, packet := range test.says {
				var oob []byte
				if test.fds && i == 0 {
					oob = unix.UnixRights(int(null.Fd()), int(null.Fd()))
				}
				if err := write(c, packet, oob); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if n, err := c.Read(make([]byte, 64)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the gate answered %d bytes, %v", n, err)
			}
			o.told(t, test.want)
			o.works(t)
			if heard := o.daemon.Heard(); !slices.Equal(heard, []string{"client"}) {
				t.Errorf("the daemon heard %q", heard)
			}
		})
	}
}

// For a client of another user the daemon would end the server of this one.
func TestAnotherUser(t *testing.T) {
	o := open(t, os.Geteuid()+1)
	if c, err := mpstest.Client(o.socket); err == nil {
		t.Error("was let through")
		_ = c.Close()
	}
	o.told(t, "run the program as that user")
	if heard := o.daemon.Heard(); heard != nil {
		t.Errorf("the daemon heard %q", heard)
	}
	open(t, AnyUser).works(t)
}

// Who says nothing is hung up on, as is who does not say that it has its socket; meanwhile the daemon is free for others.
func TestSilent(t *testing.T) {
	o := open(t, os.Geteuid())
	for range mostOfOne / 2 {
		connect(t, o)
	}
	o.works(t)
	c, err := mpstest.Dial(o.socket, mpstest.AsClient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(3 * patience))
	if _, err := receive(c, handed, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 64)); !errors.Is(err, io.EOF) {
		t.Errorf("still served: %v", err)
	}
	o.told(t, "has not spoken with the server: ")
	if n := o.doubts.Load(); n != 1 {
		t.Errorf("%d doubts", n)
	}
	if c, err := mpstest.Client(o.socket); err == nil {
		t.Error("was let through at once again")
		_ = c.Close()
	}
	o.told(t, "has been silent just now")
}

// A gate leaves no descriptor open, whoever sends some.
func TestDescriptors(t *testing.T) {
	o := open(t, os.Geteuid())
	o.works(t)
	count := func() int {
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	before := count()
	for range 20 {
		c := connect(t, o)
		if err := write(c, credentials, unix.UnixRights(0, 1, 2)); err != nil {
			t.Fatal(err)
		}
		_, _ = c.Read(make([]byte, 64)) // until it has hung up
		_ = c.Close()
		o.works(t)
	}
	for range 200 {
		if count() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d descriptors, %d before", count(), before)
}
