// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

const testVersion = "580.159.04"

// inProcess is the simulated driver without its server; cmd/cgpu-guard has the same over a socket.
type inProcess struct {
	s *sim.Session
	// jitter, if not 0, bounds a random wait between what the driver does and what the guard hears of it.
	jitter *atomic.Int64
	// seen, if not nil, is told of each call before the driver.
	seen *atomic.Pointer[func(*rm.Call)]
	name func(fd int) (uint32, error) // of the file behind a descriptor
}

// another is the same driver for a second guard, which has names of its own for files.
func (d *inProcess) another() *inProcess { return &inProcess{s: d.s, jitter: d.jitter, seen: d.seen} }

func (*inProcess) ServesNodes() bool                          { return false }
func (*inProcess) Control(cmd uint32) (rm.Control, bool)      { return sim.ControlForm(cmd) }
func (d *inProcess) Number(fd int) (uint32, error)            { return d.name(fd) }
func (d *inProcess) NameFiles(name func(int) (uint32, error)) { d.name = name }

func (d *inProcess) Open(string) (Target, error) {
	id, err := d.s.OpenFile(sim.Control, 0)
	return Target{FD: -1, File: uint32(id)}, err
}

func (d *inProcess) Exec(t Target, call *rm.Call) syscall.Errno {
	if seen := d.seen.Load(); seen != nil {
		(*seen)(call)
	}
	id := t.File
	if t.FD >= 0 {
		var err error
		if id, err = d.name(t.FD); err != nil {
			return syscall.ENOMEM
		}
	}
	e := d.s.Ioctl(sim.FileID(id), int32(t.PID), int32(t.TID), call)
	d.wait()
	return e
}

func (d *inProcess) wait() {
	if n := d.jitter.Load(); n > 0 {
		time.Sleep(time.Duration(rand.Int64N(n)))
	}
}

func (d *inProcess) OpenFile(kind rmclient.NodeKind, minor int) (uint32, error) {
	id, err := d.s.OpenFile(map[rmclient.NodeKind]sim.NodeKind{rmclient.NodeControl: sim.Control, rmclient.NodeGPU: sim.GPUNode,
		rmclient.NodeUVM: sim.UVM}[kind], minor)
	return uint32(id), err
}

func (d *inProcess) CloseFile(id uint32) {
	_ = d.s.CloseFile(sim.FileID(id))
	d.wait()
}
func (d *inProcess) CloseExport(id uint32) { _ = d.s.CloseExport(int32(id)) }
func (d *inProcess) Close()                { _ = d.s.Close() }

// rig is a guard over a simulated machine of two GPUs, of which the container has the first.
type rig struct {
	t      *testing.T
	sim    *sim.Driver
	guard  *Guard
	nodes  string
	jitter atomic.Int64
	seen   atomic.Pointer[func(*rm.Call)]
}

const testLimit = 1 * quota.GiB

func testGPUs() []sim.GPU {
	return []sim.GPU{
		{Index: 0, Minor: 0, UUID: "GPU-00000000-0000-0000-0000-000000000001", BusID: "0000:01:00.0", Name: "Tesla T4", Memory: 4 * quota.GiB},
		{Index: 1, Minor: 1, UUID: "GPU-00000000-0000-0000-0000-000000000002", BusID: "0000:02:00.0", Name: "Tesla T4", Memory: 4 * quota.GiB},
	}
}

func testConfig(nodes string) Config {
	cfg := Config{ID: "c0ffee", Nonce: "n", RunDir: nodes, Socket: nodes + "/n.sock", Driver: device.DriverSim, DriverVersion: testVersion,
		ControlNode: device.Node{HostPath: nodes + "/nvidiactl"}, UVMNode: device.Node{HostPath: nodes + "/nvidia-uvm"},
		Settings: testSettings()}
	g := testGPUs()[0]
	cfg.GPUs = []GPU{{GPU: device.GPU{Index: g.Index, Minor: g.Minor, UUID: g.UUID, BusID: g.BusID, Memory: g.Memory,
		Node: device.Node{HostPath: nodes + "/nvidia0"}}, Limit: testLimit}}
	return cfg
}

func testSettings() device.Config {
	timing := sched.DefaultTiming()
	return device.Config{ContextOverhead: sim.DefaultContextCost, MaxClients: 256, MaxTSGs: 64, MaxChannels: 512, MaxInst: 20,
		MaxHostMemory: device.Part{Bytes: quota.GiB},
		Policy:        sched.PolicyPreempt, PrioRatio: sched.DefaultPrioRatio, BaseTimeslice: timing.Base, MinTimeslice: timing.Min,
		MaxRound: timing.MaxRound, HighPrioTimeslice: timing.HighPrio, CapCycle: timing.Cycle}
}

// makeNodes makes device nodes like the simulated driver's: all are /dev/random, which can be polled.
func makeNodes(t testing.TB) string {
	t.Helper()
	testenv.NeedsRoot(t, "mknod and seccomp")
	dir := t.TempDir()
	for _, n := range []string{"nvidiactl", "nvidia-uvm", "nvidia0"} {
		p := filepath.Join(dir, n)
		if err := unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 8))); err != nil {
			testenv.Lacks(t, "mknod: %v", err)
		}
		f, err := os.OpenFile(p, os.O_RDWR, 0)
		if err != nil {
			testenv.Lacks(t, "device nodes do not work here: %v", err)
		}
		f.Close()
	}
	return dir
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, nodes: makeNodes(t)}
	var err error
	if r.sim, err = sim.New(sim.Config{DriverVersion: testVersion, GPUs: testGPUs()}); err != nil {
		t.Fatal(err)
	}
	r.newGuard()
	r.guard.gpuTime.StartRescuer = noRescuer
	return r
}

// newGuard makes the guard. The folder of the nodes is the /dev of its container.
func (r *rig) newGuard() {
	r.t.Helper()
	driver := &inProcess{s: r.sim.Session([]int{0}), jitter: &r.jitter, seen: &r.seen}
	var err error
	if r.guard, err = New(testConfig(r.nodes), driver, testLog(r.t)); err != nil {
		r.t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(r.nodes, &st); err != nil {
		r.t.Fatal(err)
	}
	r.guard.devDevice = st.Dev
	r.t.Cleanup(r.guard.events.Close) // a line under way would be in the way of who removes the folder
}

// noRescuer stands for a rescuer: the guard's own starts this program, which is the tests.
func noRescuer(string, *atomic.Bool) (*os.Process, *os.File, error) { return nil, nil, nil }

// testLog shows what the guard logged when a test fails.
func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// child is a process under the guard.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out chan string
}

// start runs a child; it is killed at the end of the test.
func (r *rig) start(options ...func(*exec.Cmd)) *child {
	r.t.Helper()
	return startChild(r.t, r.guard, r.nodes, options...)
}

func startChild(t testing.TB, g *Guard, nodes string, options ...func(*exec.Cmd)) *child {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "pair")
	c := &child{t: t, cmd: exec.Command(os.Args[0]), out: make(chan string, 16)}
	c.cmd.Env = append(os.Environ(), childEnv+"=filter", nodesEnv+"="+nodes)
	c.cmd.ExtraFiles = []*os.File{theirs}
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range options {
		o(c.cmd)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(c.kill)
	go func() {
		s := bufio.NewScanner(out)
		for s.Scan() {
			c.out <- s.Text()
		}
		close(c.out)
	}()
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	unix.Close(pair[0])
	if err != nil {
		t.Fatal("no listener came: ", err)
	}
	fds, err := parseFDs(oob[:n])
	if err != nil || len(fds) != 1 {
		t.Fatal("no listener came: ", fds, err)
	}
	if err := g.serveFilter(fds[0], specs.ContainerProcessState{Pid: c.cmd.Process.Pid}); err != nil {
		t.Fatal(err)
	}
	return c
}

func withEnv(s string) func(*exec.Cmd) { return func(c *exec.Cmd) { c.Env = append(c.Env, s) } }

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// send gives an order without waiting.
func (c *child) send(words ...any) {
	fmt.Fprintln(c.in, words...)
}

// answer waits for what the child says.
func (c *child) answer() (string, error) {
	select {
	case line, ok := <-c.out:
		if !ok {
			return "", fmt.Errorf("the child ended")
		}
		word, rest, _ := strings.Cut(line, " ")
		if word != "ok" {
			return "", fmt.Errorf("%s", rest)
		}
		return rest, nil
	case <-time.After(patience):
		return "", fmt.Errorf("the child does not answer")
	}
}

func (c *child) try(words ...any) (string, error) {
	c.send(words...)
	return c.answer()
}

// do gives an order that must work, and returns the numbers in the answer.
func (c *child) do(words ...any) []int {
	c.t.Helper()
	s, err := c.try(words...)
	if err != nil {
		c.t.Fatalf("%v: %v", words, err)
	}
	var list []int
	for _, w := range strings.Fields(s) {
		n, err := strconv.Atoi(w)
		if err != nil {
			c.t.Fatalf("%v: answer %q", words, s)
		}
		list = append(list, n)
	}
	return list
}

// refused gives an order that must fail with an error that has a word in it.
func (c *child) refused(why string, words ...any) {
	c.t.Helper()
	if s, err := c.try(words...); err == nil || !strings.Contains(err.Error(), why) {
		c.t.Errorf("%v: %q, %v; want %s", words, s, err, why)
	}
}

// agree waits until the guard and the driver count the same, to the byte, and that is want.
func (r *rig) agree(want quota.Bytes) {
	r.t.Helper()
	var used quota.Bytes
	var s sim.GPUSnapshot
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r.guard.sweep()
		used, s = r.guard.account.usage(0).used, r.sim.Snapshot().GPUs[0]
		if used == want && s.Used == want {
			r.survives()
			return
		}
	}
	r.t.Fatalf("the guard counts %v, the driver %v: want %v", used, s.Used, want)
}

// empty waits until nothing of the container is left anywhere.
func (r *rig) empty() {
	r.t.Helper()
	r.agree(0)
	var s sim.Snapshot
	files, clients, objects := 0, 0, 0
	if own := r.guard.rmClient; own != nil { // the guard's client stays
		files, clients, objects = 1, 1, 1+2*len(own.Subdevices())
	}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r.guard.sweep()
		if s = r.sim.Snapshot(); s.Files == files {
			break
		}
	}
	if s.Clients != clients || s.Objects != objects || s.Exports != 0 || s.Files != files {
		r.t.Errorf("the driver still has %d files, %d clients, %d objects, %d exports", s.Files, s.Clients, s.Objects, s.Exports)
	}
	a := r.guard.account
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.clients) != 0 || a.objects != 0 || a.zombies != 0 || a.gpus[0].counts != (counts{}) || a.dmaMaps != 0 || a.osEvents != 0 ||
		a.hostUsed != 0 || a.windows != 0 || a.gpus[0].windows != 0 || s.GPUs[0].BAR1 != 0 {
		r.t.Errorf("the account still has %d clients, %d objects, %d zombies", len(a.clients), a.objects, a.zombies)
	}
	if n := r.guard.files.count(); n != 0 {
		r.t.Errorf("%d files are still followed", n)
	}
}
