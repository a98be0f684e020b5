// SPDX-License-Identifier: Apache-2.0

package km

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// ErrGone says that what a file was about, a container or a GPU, is there no more.
var ErrGone = errors.New("it is gone")

// Use is what a container uses of one GPU.
type Use struct {
	Used      quota.Bytes
	Processes []Process
}

// Process is one process of a container that holds memory of the GPU.
type Process struct {
	PID  int // on the host, as the file is the host's
	Used quota.Bytes
}

// Text is what a file says. use asks for a container's use of a GPU, and is called for MemInfo only: it costs a call to the
// guard, and a script that looks at one weight must not wait for all guards.
func (n Node) Text(f File, use func(r ledger.Record, uuid string) (Use, error)) (string, error) {
	if f.Kind == Version {
		return versionNumber(n.Version) + "\n", nil
	}
	g, ok := n.gpu(f.Slice.GPU)
	if !ok {
		return "", ErrGone
	}
	card, shares := n.sharing(g.UUID)
	switch f.Kind {
	case MaxInst:
		return line(card.MaxInst), nil
	case Policy:
		return line(int(card.Effective(shares))), nil
	case PrioRatio:
		return line(card.PrioRatio), nil
	case FreeWeight:
		return line(freeWeight(card, shares)), nil
	}
	r, v, ok := n.slice(f.Slice)
	if !ok {
		return "", ErrGone
	}
	switch f.Kind {
	case ID:
		return line(number(g.Index, n.Slots[f.Slice])), nil
	case MemSize:
		return line(uint64(v.Limit)), nil
	case Weight:
		return line(v.Share.Weight), nil
	case MemInfo:
		u, err := use(r, g.UUID)
		if err != nil {
			return "", err
		}
		return memInfo(v.Limit, u), nil
	}
	return "", fmt.Errorf("km: no file %q", f.Path)
}

// sharing is how a GPU is shared and what its slices ask.
func (n Node) sharing(uuid string) (sched.Card, []sched.Share) {
	card, ok := n.Cards[uuid]
	if !ok {
		card = n.Table.Config.Card()
	}
	var shares []sched.Share
	for _, r := range n.Records {
		for _, v := range r.VGPUs {
			if v.UUID == uuid {
				shares = append(shares, v.Share)
			}
		}
	}
	return card, shares
}

// freeWeight: in cGPU the weights of a card's containers add up to max_inst at most. Under cgpu's work-conserving policies
// they need not, and then none is free.
func freeWeight(card sched.Card, shares []sched.Share) int {
	free := card.MaxInst
	for _, s := range shares {
		free -= s.Weight
	}
	return max(free, 0)
}

// memInfo lists bytes. A process that opened the driver and holds nothing has no line, as in cgpu smi.
func memInfo(limit quota.Bytes, u Use) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Free: %d\n", uint64(limit-min(limit, u.Used)))
	for _, p := range u.Processes {
		if p.Used > 0 {
			fmt.Fprintf(&b, "PID: %d Mem: %d\n", p.PID, uint64(p.Used))
		}
	}
	return b.String()
}

func line[T int | uint64](n T) string { return fmt.Sprintf("%d\n", n) }

// release is the beginning of a version that is a release or comes after one (git describe).
var release = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)\b`)

// versionNumber is three numbers, as scripts compare them: 0.0.0 where cgpu was built without a version.
func versionNumber(version string) string {
	if m := release.FindStringSubmatch(version); m != nil {
		return m[1]
	}
	return "0.0.0"
}
