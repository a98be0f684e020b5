// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func cmdAlloc(args []string) error {
	fs := flag.NewFlagSet("alloc", flag.ExitOnError)
	count := fs.Int("count", 1, "how many")
	free := fs.Bool("free", false, "free each again")
	_ = fs.Parse(args)
	size, err := parseSize(fs.Arg(0))
	if err != nil {
		return err
	}
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	var sum quota.Bytes
	for range *count {
		h, granted, err := c.memory(size)
		if err != nil {
			print("status=%s\nbytes=%d", describe(err), sum)
			return err
		}
		if *free {
			if err := c.free(h); err != nil {
				return err
			}
			continue
		}
		sum += granted
	}
	print("status=ok\nbytes=%d", sum)
	return nil
}

// fill allocates chunks until one is refused, then ever smaller ones down to 64 KiB.
func (c *client) fill(chunk quota.Bytes) (sum quota.Bytes, n int, last error) {
	for chunk >= 64*quota.KiB {
		_, granted, err := c.memory(chunk)
		if err != nil {
			last = err
			chunk /= 2
			continue
		}
		sum += granted
		n++
		if n > 1<<20 {
			return sum, n, fmt.Errorf("more than %d allocations without a refusal", n)
		}
	}
	return sum, n, last
}

func cmdOOM(args []string) error {
	fs := flag.NewFlagSet("oom", flag.ExitOnError)
	chunk := fs.String("chunk", "64MiB", "size of the first allocations")
	_ = fs.Parse(args)
	size, err := parseSize(*chunk)
	if err != nil {
		return err
	}
	c, total, before, err := openCounted(patient)
	if err != nil {
		return err
	}
	defer c.close()
	sum, n, last := c.fill(size)
	_, after, err := c.usage()
	if err != nil {
		return err
	}
	print("bytes=%d\nmib=%d\nallocations=%d\nstatus=%s", sum, sum/quota.MiB, n, describe(last))
	print("total_mib=%d\nfree_before_mib=%d\nfree_after_mib=%d", total/quota.MiB, before/quota.MiB, after/quota.MiB)
	if sum > total {
		return fmt.Errorf("got %v of a GPU of %v", sum, total)
	}
	if statusOf(last) != rm.StatusNoMemory {
		return fmt.Errorf("the refusal was %s: want NO_MEMORY (0x51)", describe(last))
	}
	return nil
}

// wait waits for a signal or the end of the time; zero is for ever.
func wait(seconds string) error {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	print("ready=1")
	if seconds == "" {
		<-ch
		return nil
	}
	n, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		return fmt.Errorf("seconds %q: want a number", seconds)
	}
	select {
	case <-ch:
	case <-time.After(time.Duration(n * float64(time.Second))):
	}
	return nil
}

func arg(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

func cmdHold(c *client, args []string) error {
	size, err := parseSize(arg(args, 0))
	if err != nil {
		return err
	}
	c.shareWithUser()
	h, granted, err := c.memory(size)
	if err != nil {
		print("status=%s", describe(err))
		return err
	}
	print("pid=%d\nclient=%#x\nobject=%#x\nbytes=%d", os.Getpid(), c.handle, h, granted)
	return wait(arg(args, 1))
}

// shareWithUser lets every process of the same user duplicate the client's objects, as libcuda does for CUDA IPC.
func (c *client) shareWithUser() {
	p := make([]byte, rm.SharePolicySize)
	rm.PutU32(p, rm.SharePolicyTarget, 0)
	rm.PutU32(p, rm.SharePolicyAccess, 1) // RS_ACCESS_DUP_OBJECT
	rm.PutU32(p, rm.SharePolicyType, 2)   // RS_SHARE_TYPE_OS_SECURITY_TOKEN
	if err := c.control(c.handle, 0xd04, p); err != nil {
		print("share=%s", describe(err))
	}
}

// group makes a channel group on an engine.
func (c *client) group(engine uint32) (uint32, error) {
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, engine)
	return c.alloc(c.device, c.newHandle(), classGroup, p)
}

func cmdContext(c *client, _, before quota.Bytes, args []string) error {
	for _, engine := range []uint32{1, 11, 12, 13} { // as a context of CUDA 13 on an H200
		h, err := c.group(engine)
		if err != nil {
			return err
		}
		_, free, err := c.usage()
		if err != nil {
			return err
		}
		print("tsg=%#x:%d\nhidden_kib=%d", h, engine, (before-free)/quota.KiB)
	}
	print("pid=%d\nclient=%#x", os.Getpid(), c.handle)
	return wait(arg(args, 0))
}

func countArg(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 10000 {
		return 0, fmt.Errorf("count %q: want 1 to 10000", s)
	}
	return n, nil
}

func cmdThreads(c *client, total, before quota.Bytes, args []string) error {
	n, err := countArg(arg(args, 0))
	if err != nil {
		return err
	}
	size, err := parseSize(arg(args, 1))
	if err != nil {
		return err
	}
	var (
		wg                 sync.WaitGroup
		allocated, refused atomic.Int64
		live, most         atomic.Int64
		first              atomic.Pointer[error]
		fail               = func(err error) { first.CompareAndSwap(nil, &err) }
	)
	const rounds = 50
	for range n {
		wg.Go(func() {
			for range rounds {
				h, granted, err := c.memory(size)
				if err != nil {
					refused.Add(1)
					if statusOf(err) != rm.StatusNoMemory {
						fail(err)
						return
					}
					continue
				}
				allocated.Add(1)
				now := live.Add(int64(granted))
				for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
				}
				live.Add(-int64(granted)) // before the free: never more than the driver has
				if err := c.free(h); err != nil {
					fail(err)
					return
				}
			}
		})
	}
	wg.Wait()
	_, after, err := c.usage()
	if err != nil {
		return err
	}
	print("allocated=%d\nrefused=%d\nmost_live_mib=%d", allocated.Load(), refused.Load(), quota.Bytes(most.Load())/quota.MiB)
	print("free_before_mib=%d\nfree_after_mib=%d", before/quota.MiB, after/quota.MiB)
	if p := first.Load(); p != nil {
		return *p
	}
	if quota.Bytes(most.Load()) > total {
		return fmt.Errorf("threads held %v at once of a GPU of %v", quota.Bytes(most.Load()), total)
	}
	if before != after {
		return fmt.Errorf("free memory was %v before and is %v after", before, after)
	}
	return nil
}

func cmdFork(c *client, total, before quota.Bytes, args []string) error {
	n, err := countArg(arg(args, 0))
	if err != nil {
		return err
	}
	size := arg(args, 1)
	if _, err := parseSize(size); err != nil {
		return err
	}
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		kids []*exec.Cmd
		held quota.Bytes
		bad  []string
		no   int
	)
	for range n {
		kid := exec.Command("/proc/self/exe", "hold", size)
		out, err := kid.StdoutPipe()
		if err == nil {
			err = kid.Start()
		}
		if err != nil {
			return fmt.Errorf("start a child: %w", err)
		}
		kids = append(kids, kid)
		wg.Go(func() { // until it is ready, or ends
			for sc := bufio.NewScanner(out); sc.Scan(); {
				k, v, _ := strings.Cut(sc.Text(), "=")
				mu.Lock()
				switch k {
				case "bytes":
					b, _ := strconv.ParseUint(v, 10, 64)
					held += quota.Bytes(b)
				case "status":
					no++
					if v != rm.StatusName(rm.StatusNoMemory) {
						bad = append(bad, v)
					}
				}
				mu.Unlock()
				if k == "ready" {
					return
				}
			}
		})
	}
	wg.Wait()
	_, during, err := c.usage()
	for _, kid := range kids {
		_ = kid.Process.Kill()
		_ = kid.Wait()
	}
	if err != nil {
		return err
	}
	print("children=%d\nrefused=%d\nheld_mib=%d\nfree_during_mib=%d", n, no, held/quota.MiB, during/quota.MiB)
	switch {
	case len(bad) > 0:
		return fmt.Errorf("a child was refused with %s: want NO_MEMORY", bad[0])
	case held > total:
		return fmt.Errorf("children held %v of a GPU of %v", held, total)
	case before-min(before, during) < held:
		return fmt.Errorf("children held %v, but free memory fell from %v to %v", held, before, during)
	}
	after, err := c.waitFree(before)
	print("free_before_mib=%d\nfree_after_mib=%d", before/quota.MiB, after/quota.MiB)
	return err
}

// waitFree waits for the free memory to come back to want, for a second: the death of a process is noticed, not announced.
func (c *client) waitFree(want quota.Bytes) (quota.Bytes, error) {
	for end := time.Now().Add(time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, free, err := c.usage()
		if err != nil || free >= want {
			return free, err
		}
		if time.Now().After(end) {
			return free, fmt.Errorf("free memory is %v a second after the end: want %v as before", free, want)
		}
	}
}
