// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// cmdSendFDs opens the driver's nodes and sends their descriptors to whoever connects to a socket, as a container does that lends its
// GPU to another one. With a size it sends the file on which it has allocated that much.
func cmdSendFDs(args []string) error {
	socket := arg(args, 0)
	if socket == "" {
		return errors.New("name a socket")
	}
	_ = os.Remove(socket)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	defer l.Close()
	_ = os.Chmod(socket, 0o666)
	var used *client // whose files are sent in place of new ones
	if arg(args, 1) != "" {
		size, err := parseSize(args[1])
		if err != nil {
			return err
		}
		if used, err = openGPU(patient); err != nil {
			return err
		}
		if _, _, err := used.memory(size); err != nil {
			return err
		}
	}
	print("ready=1")
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		paths, _ := filepath.Glob("/dev/nvidia*")
		var names []string
		var fds []int
		if used != nil {
			if fd, err := syscall.Dup(used.fd); err == nil {
				paths, names, fds = nil, []string{"/dev/nvidiactl"}, []int{fd}
			}
		}
		for _, path := range paths {
			if fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0); err == nil {
				names, fds = append(names, path), append(fds, fd)
			}
		}
		_, _, err = conn.WriteMsgUnix([]byte(strings.Join(names, "\n")), syscall.UnixRights(fds...), nil)
		print("sent=%d", len(fds))
		conn.Close()
		for _, fd := range fds { // nothing of it is here any more
			syscall.Close(fd)
		}
		if err != nil {
			return err
		}
	}
}

// cmdRecvFDs allocates as much as it can by descriptors that it gets from a socket, holds it, and says how much it has. It succeeds if
// all is refused. Where nothing refuses, somebody has to kill it. With a time it holds the descriptors only.
func cmdRecvFDs(args []string) error {
	socket := arg(args, 0)
	var conn *net.UnixConn
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		var err error
		if conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"}); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return err
		}
	}
	buf, oob := make([]byte, 64<<10), make([]byte, 64<<10)
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return err
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("no descriptors came (%v)", err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	names := strings.Split(string(buf[:n]), "\n")
	if len(names) != len(fds) {
		return fmt.Errorf("%d descriptors with %d names", len(fds), len(names))
	}
	print("received=%d", len(fds))
	if len(args) > 1 {
		return wait(args[1])
	}
	c, err := clientOn(names, fds)
	print("client=%s", describe(err))
	if err != nil {
		if e := new(rmError); errors.As(err, &e) && (e.errno == syscall.EPERM || e.errno == syscall.ENOTTY) {
			print("refused=1") // ENOTTY: the simulated driver has nobody to answer
			return nil
		}
		return err
	}
	began := time.Now()
	var held quota.Bytes
	for size := 1 * quota.GiB; size >= 2*quota.MiB; {
		_, granted, err := c.memory(size)
		if err != nil {
			size /= 2
			continue
		}
		held += granted
		print("held_mib=%d", held/quota.MiB)
	}
	print("full=1\nafter_ms=%d", time.Since(began).Milliseconds())
	for {
		_, _, err := c.usage()
		print("alive_ms=%d usage=%s", time.Since(began).Milliseconds(), describe(err))
		time.Sleep(100 * time.Millisecond)
		if time.Since(began) > 15*time.Second {
			return fmt.Errorf("holds %v of a GPU that it was not given, for %v", held, time.Since(began).Round(time.Second))
		}
	}
}

// clientOn makes a client with a device of the first GPU on files that somebody else opened.
func clientOn(names []string, fds []int) (*client, error) {
	c := &client{call: patient, fd: -1}
	c.next.Store(firstProbeHandle)
	c.fbInfo.Store(1028)
	gpus := map[string]int{}
	for i, name := range names {
		switch name {
		case "/dev/nvidiactl":
			if c.fd < 0 {
				c.fd = fds[i]
			}
		default:
			if _, ok := gpus[name]; !ok {
				gpus[name] = fds[i]
			}
		}
	}
	if c.fd < 0 {
		return nil, errors.New("no nvidiactl came")
	}
	out := make([]byte, allocSize)
	rm.PutU32(out, rm.AllocClass, classRootClient)
	if err := c.allocRaw(out, nil); err != nil {
		return nil, err
	}
	c.handle = rm.U32(out, rm.AllocObject)
	return c, c.attachBy(func(path string) (int, error) {
		if fd, ok := gpus[path]; ok {
			return fd, nil
		}
		return -1, syscall.ENXIO // not sent
	})
}
