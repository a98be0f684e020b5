// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/mps/mpstest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// MPS on the simulated driver, as far as the driver sees it (docs/internals/mps.md): the server makes a channel group with a context and
// two pieces of memory, tells each client their handles by the socket that the daemon handed out, and each client makes second handles on
// them and channels of its own below the group's.

// offered is what the server tells: its client, the channel group, two pieces of memory, and the client's part of the multiprocessors.
type offered [5]uint32

// mpsServer is the one server of a daemon, made for its first client.
type mpsServer struct {
	make    sync.Once
	offered offered
	err     error
	client  *client
}

// cmdMPSControl stands for nvidia-cuda-mps-control, and for the server that that starts, which is in FAULT where MPS_FAULT is set.
func cmdMPSControl(args []string) error {
	var s mpsServer
	return mpstest.Program(args, &mpstest.Daemon{Server: s.serve, Fault: os.Getenv("MPS_FAULT") != ""})
}

func (s *mpsServer) serve(c *net.UnixConn, percent string) {
	defer c.Close()
	if s.make.Do(func() { s.offered, s.err = s.start() }); s.err != nil {
		fmt.Fprintln(os.Stderr, "cgpu-probe: MPS server:", s.err)
		return
	}
	o := s.offered
	if n, err := strconv.Atoi(percent); err == nil {
		o[4] = uint32(n)
	}
	words := make([]byte, 4*len(o))
	for i, w := range o {
		rm.PutU32(words, 4*i, w)
	}
	if _, err := c.Write(words); err == nil {
		_, _ = c.Read(words) // until the client ends
	}
}

func (s *mpsServer) start() (o offered, err error) {
	if s.client, err = openGPU(patient); err != nil {
		return o, err
	}
	c := s.client
	o[0] = c.handle
	c.shareWithUser()
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, rm.ChannelEngineTypeGR)
	if o[1], err = c.alloc(c.device, c.newHandle(), classGroup, p); err != nil {
		return o, err
	}
	if _, err = c.computeBelow(o[1]); err != nil {
		return o, err
	}
	if c.schedule(o[1], false) != nil {
		return o, errors.New("the channel group cannot be scheduled")
	}
	for i := range 2 {
		if o[2+i], _, err = c.memory(2 * quota.MiB); err != nil {
			return o, err
		}
		if err := c.share(o[2+i]); err != nil {
			return o, err
		}
	}
	return o, nil
}

// cmdMPSClient is a CUDA program whose domain has an MPS server.
func cmdMPSClient(args []string) error {
	fs := flag.NewFlagSet("mps-client", flag.ExitOnError)
	text := fs.String("size", "64MiB", "memory of its own")
	seconds := fs.String("hold", "", "for how long; empty: until a signal, or the server's end")
	_ = fs.Parse(args)
	size, err := parseSize(*text)
	if err != nil {
		return err
	}
	folder, ok := os.LookupEnv("CUDA_MPS_PIPE_DIRECTORY")
	if !ok {
		return errors.New("CUDA_MPS_PIPE_DIRECTORY is not set")
	}
	server, err := mpstest.Client(filepath.Join(folder, mps.SocketName))
	if err != nil {
		return fmt.Errorf("the MPS server: %w", err)
	}
	defer server.Close()
	words := make([]byte, 64)
	_ = server.SetReadDeadline(time.Now().Add(time.Minute))
	n, err := server.Read(words)
	if err != nil || n != 4*len(offered{}) {
		return fmt.Errorf("the MPS server said %d bytes, %v", n, err)
	}
	_ = server.SetReadDeadline(time.Time{})
	var o offered
	for i := range o {
		o[i] = rm.U32(words, 4*i)
	}
	c, _, before, err := openCounted(patient)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.join(o); err != nil {
		return err
	}
	if _, _, err := c.memory(size); err != nil {
		return err
	}
	_, free, err := c.usage()
	if err != nil {
		return err
	}
	print("used_kib=%d\nserver=%#x\npart=%d\npid=%d\nready=1", (before-free)/quota.KiB, o[0], o[4], os.Getpid())
	if *seconds != "" {
		return wait(*seconds)
	}
	if _, err := server.Read(words); err != nil {
		return fmt.Errorf("the MPS server has ended: %w", err)
	}
	return errors.New("the MPS server said something")
}

// join makes a context below what the server has.
func (c *client) join(o offered) error {
	group, err := c.dup(o[0], o[1])
	if err != nil {
		return err
	}
	for _, memory := range o[2:4] {
		if _, err := c.dup(o[0], memory); err != nil {
			return err
		}
	}
	channel, err := c.computeBelow(group)
	if err != nil {
		return err
	}
	return c.schedule(channel, true)
}

// computeBelow makes a channel with a compute object below a group, in an address space of its own.
func (c *client) computeBelow(group uint32) (channel uint32, err error) {
	space, err := c.addressSpace(0)
	if err != nil {
		return 0, err
	}
	p := make([]byte, 12)
	rm.PutU32(p, rm.ContextShareVASpace, space)
	share, err := c.alloc(group, c.newHandle(), classContextShare, p)
	if err != nil {
		return 0, err
	}
	p = make([]byte, channelSize)
	rm.PutU32(p, rm.ChannelContextShare, share)
	rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeGR)
	if channel, err = c.alloc(group, c.newHandle(), classChannel, p); err != nil {
		return 0, err
	}
	_, err = c.alloc(channel, c.newHandle(), classCompute, make([]byte, 16))
	return channel, err
}
