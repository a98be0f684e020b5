package guard

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// A guard that is killed while its container's channels are off would leave them off for ever. So it never pauses anything
// before there is a second process, cgpu-rescue, that waits for the end of a pipe from it and then lets run what was off. What
// is off stands in a file that both map, written before the driver is asked to pause; should both be killed, `cgpu resume`
// reads the file.
type rescue struct {
	path    string
	mem     []byte
	entries int // for each GPU
	pipe    *os.File
	process *os.Process
	gone    atomic.Bool
}

// The file: the length of a Config, the Config as JSON, and from rescueHeader on for each GPU a count and so many times a
// client, a channel, and the process that made the client.
const (
	rescueHeader = 16 << 10
	rescueEntry  = 12
)

func rescuePath(cfg Config) string { return LeftoversFile(cfg.Socket) }

// LeftoversSuffix ends the name of such a file.
const LeftoversSuffix = ".pause"

// LeftoversFile is where a guard notes what it has paused, by its socket (ledger.Record).
func LeftoversFile(socket string) string {
	return strings.TrimSuffix(socket, ".sock") + LeftoversSuffix
}

// insure makes sure that the rescuer lives.
func (c *compute) insure() error {
	if c.closed {
		return errors.New("the container is over")
	}
	if c.rescue != nil && !c.rescue.gone.Load() {
		return nil
	}
	if c.g.startRescuer == nil {
		c.g.startRescuer = startRescuer
	}
	var err error
	r := c.rescue
	if r == nil {
		if r, err = newRescue(c.g.cfg); err != nil {
			return err
		}
	} else if r.pipe != nil { // of a rescuer that was killed. Its file says what is off now, perhaps on another GPU.
		_ = r.pipe.Close()
		r.pipe = nil
	}
	r.gone.Store(false)
	if r.process, r.pipe, err = c.g.startRescuer(r.path, &r.gone); err != nil {
		r.gone.Store(true)
		if c.rescue == nil {
			r.close()
		}
		return err
	}
	c.rescue = r
	return nil
}

func newRescue(cfg Config) (*rescue, error) {
	r := &rescue{path: rescuePath(cfg), entries: max(cfg.Settings.MaxChannels, 64)}
	said, err := json.Marshal(cfg)
	if err != nil || len(said) > rescueHeader-8 {
		return nil, fmt.Errorf("the configuration of %d bytes does not fit: %v", len(said), err)
	}
	f, err := os.OpenFile(r.path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", r.path, err)
	}
	defer f.Close()
	size := rescueHeader + len(cfg.GPUs)*r.section()
	if err := f.Truncate(int64(size)); err != nil {
		return nil, fmt.Errorf("make %s: %w", r.path, err)
	}
	if r.mem, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %s: %w", r.path, err)
	}
	rm.PutU32(r.mem, 0, uint32(len(said)))
	rm.PutU32(r.mem, 4, uint32(r.entries))
	copy(r.mem[8:], said)
	return r, nil
}

func (r *rescue) section() int { return 8 + rescueEntry*r.entries }

// entry is where one of a GPU's is.
func (r *rescue) entry(gpu, i int) int { return rescueHeader + gpu*r.section() + 8 + rescueEntry*i }

func (r *rescue) count(gpu int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&r.mem[rescueHeader+gpu*r.section()]))
}

// note writes down what is about to be off on a GPU, beside what is off already: the list is valid all the time. What is off for good
// is nothing to resume.
func (r *rescue) note(g *Guard, gpu int, channels []chanRef) {
	n := int(r.count(gpu).Load())
	noted, goOn := map[uint64]bool{}, g.account.goingOn()
	for i := range n {
		noted[rm.U64(r.mem, r.entry(gpu, i))] = true
	}
	for _, ch := range g.account.bound(channels) {
		if !goOn[ch.client] || noted[uint64(ch.handle)<<32|uint64(ch.client)] {
			continue
		}
		if n == r.entries {
			g.logOnce("rescuefull", "more channels than max_channels", "channels", len(channels))
			break
		}
		at := r.entry(gpu, n)
		rm.PutU32(r.mem, at, ch.client)
		rm.PutU32(r.mem, at+4, ch.handle)
		rm.PutU32(r.mem, at+8, uint32(ch.tgid))
		n++
	}
	r.count(gpu).Store(uint32(n))
}

// keep drops what is noted of a GPU and runs again: all but some channels. Each of those is in the list all the time.
func (r *rescue) keep(gpu int, channels []chanRef) {
	left := map[uint64]bool{}
	for _, ch := range channels {
		left[uint64(ch.handle)<<32|uint64(ch.client)] = true
	}
	n := 0
	for i := range int(r.count(gpu).Load()) {
		if at := r.entry(gpu, i); left[rm.U64(r.mem, at)] {
			copy(r.mem[r.entry(gpu, n):], r.mem[at:at+rescueEntry])
			n++
		}
	}
	r.count(gpu).Store(uint32(n))
}

func (r *rescue) forget(gpu int) {
	if r != nil {
		r.count(gpu).Store(0)
	}
}

// close ends the rescuer, when nothing is off any more.
func (r *rescue) close() {
	if r.pipe != nil {
		_ = r.pipe.Close()
	}
	if r.mem != nil {
		_ = unix.Munmap(r.mem)
	}
	_ = os.Remove(r.path)
}

// startRescuer runs this program as cgpu-rescue. The name differs, so that `pkill cgpu-guard` does not end both.
func startRescuer(path string, gone *atomic.Bool) (*os.Process, *os.File, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{RescueName, path}
	cmd.Stdin = read
	cmd.Dir = "/"
	ready, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	_ = read.Close()
	if err != nil {
		_ = write.Close()
		return nil, nil, fmt.Errorf("start %s: %w", RescueName, err)
	}
	line, _ := bufio.NewReader(io.LimitReader(ready, 4096)).ReadString('\n')
	if strings.TrimSpace(line) != "ok" {
		_ = write.Close()
		_ = cmd.Wait()
		return nil, nil, fmt.Errorf("%s: %s", RescueName, strings.TrimSpace(line))
	}
	go func() {
		_ = cmd.Wait()
		gone.Store(true)
	}()
	return cmd.Process, write, nil
}

// RescueName is how cgpu-guard is called to wait for the end of another one.
const RescueName = "cgpu-rescue"

// Rescue waits for the end of in and then resumes what the file at path says is off. ready is told when it waits.
func Rescue(path string, in io.Reader, open func(Config) (Driver, error), ready func(), log func(Config) *slog.Logger) error {
	cfg, err := rescueConfig(path)
	if err != nil {
		return err
	}
	driver, err := open(cfg)
	if err != nil {
		return err
	}
	defer driver.Close()
	g, err := newResumer(cfg, driver, log(cfg))
	if err != nil {
		return err
	}
	ready()
	_, _ = io.Copy(io.Discard, in)
	_, err = g.resume(path)
	return err
}

// ResumeLeftovers resumes what a guard that was killed, and its rescuer with it, left off; it returns how many channels.
func ResumeLeftovers(path string, open func(Config) (Driver, error), log *slog.Logger) (int, error) {
	cfg, err := rescueConfig(path)
	if err != nil {
		return 0, err
	}
	driver, err := open(cfg)
	if err != nil {
		return 0, err
	}
	defer driver.Close()
	g, err := newResumer(cfg, driver, log)
	if err != nil {
		return 0, err
	}
	return g.resume(path)
}

func rescueConfig(path string) (cfg Config, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return cfg, fmt.Errorf("read what is paused: %w", err)
	}
	if len(b) < rescueHeader || int(rm.U32(b, 0)) > rescueHeader-8 {
		return cfg, fmt.Errorf("%s is damaged", path)
	}
	if err := json.Unmarshal(b[8:8+rm.U32(b, 0)], &cfg); err != nil {
		return cfg, fmt.Errorf("%s is damaged: %w", path, err)
	}
	return cfg, nil
}

// newResumer is a guard that can do nothing but resume. It opens the GPU nodes, without which RM gives no device.
func newResumer(cfg Config, driver Driver, log *slog.Logger) (*Guard, error) {
	abi, err := rm.ForDriver(cfg.DriverVersion, cfg.Settings.AllowUnknownDriver)
	if err != nil {
		return nil, err
	}
	g := &Guard{cfg: cfg, log: log, driver: driver, abi: abi, logged: map[string]map[string]bool{}}
	for _, x := range cfg.GPUs {
		id, err := identify(x.BusID, x.Minor)
		if err != nil {
			return nil, fmt.Errorf("GPU %d: %w", x.Index, err)
		}
		g.gpus = append(g.gpus, id)
	}
	return g, g.openNodes()
}

// resume lets everything run that the file says is off, but for what ends (mayRun). The file goes when all of it does.
func (g *Guard) resume(path string) (int, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil // the guard ended as it should
	}
	if err != nil {
		return 0, fmt.Errorf("read what is paused: %w", err)
	}
	r := &rescue{entries: int(rm.U32(b, 4))}
	if len(b) < rescueHeader+len(g.cfg.GPUs)*r.section() {
		return 0, fmt.Errorf("%s is damaged", path)
	}
	resumed := 0
	c := &compute{g: g}
	for gpu := range g.cfg.GPUs {
		var channels []chanRef
		for i := range min(int(rm.U32(b, r.entry(gpu, 0)-8)), r.entries) {
			at := r.entry(gpu, i)
			channels = append(channels, chanRef{client: rm.U32(b, at), handle: rm.U32(b, at+4), tgid: int(rm.U32(b, at+8))})
		}
		channels = ofLiving(channels)
		if len(channels) == 0 {
			continue
		}
		g.log.Warn("the guard is gone while its container was paused; its channels run again", "channels", len(channels))
		done := c.disable(gpu, channels, chanRuns)
		if done < len(channels) {
			err = fmt.Errorf("the driver refuses to resume %d of %d channels on GPU %d", len(channels)-done, len(channels), g.cfg.GPUs[gpu].Index)
		}
		resumed += done
	}
	if err == nil {
		_ = os.Remove(path)
	}
	return resumed, err
}
