// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/peerpage"
)

// Rest has no goroutine of the scheduler's change anything until wake: State can be asked then. False: one does just now, try again.
func (s *Scheduler) Rest() (wake func(), ok bool) {
	if !s.resting.TryLock() {
		return nil, false
	}
	if !s.running.TryLock() {
		s.resting.Unlock()
		return nil, false
	}
	return func() {
		s.running.Unlock()
		s.resting.Unlock()
	}, true
}

// LetGoOfPages lets go of what is looked at in channels: the guard's handles on it end with this program. It is called while resting.
func (s *Scheduler) LetGoOfPages() {
	for _, x := range s.gpus {
		if x.priority != nil {
			x.priority.work.Release()
		}
	}
}

// active calls f, but not while the scheduler rests.
func (s *Scheduler) active(f func()) {
	s.resting.RLock()
	defer s.resting.RUnlock()
	f()
}

// State is what the program that goes on in this one's place has to know. It is asked while the scheduler rests.
func (s *Scheduler) State() (list []handover.GPUTime, rescuer *handover.Rescuer) {
	for _, x := range s.gpus {
		list = append(list, x.state())
	}
	if r := s.rescue; r != nil {
		rescuer = &handover.Rescuer{Gone: r.gone.Load()}
		if r.process != nil {
			rescuer.PID = r.process.Pid
		}
		if r.pipe != nil {
			rescuer.Pipe = int(r.pipe.Fd())
		}
	}
	return list, rescuer
}

func (x *gpuScheduler) state() handover.GPUTime {
	x.mu.Lock()
	defer x.mu.Unlock()
	v := handover.GPUTime{GPU: x.gpu, Active: x.active.Load(), Off: x.off, OffAll: x.offAll, Refused: x.refused,
		Drift: x.drift, Local: x.local.State()}
	if x.page != nil {
		v.Place = x.page.Place()
	}
	for c, m := range x.lost {
		v.Lost = append(v.Lost, handover.LostFile{Client: c.Handle(), Since: m.since.UnixNano(), Looked: m.looked.UnixNano(), Off: m.off})
	}
	slices.SortFunc(v.Lost, func(a, b handover.LostFile) int { return int(int64(a.Client) - int64(b.Client)) })
	return v
}

// Restore puts in force what another program had, before anything runs. clients finds a client by its handle.
func (s *Scheduler) Restore(list []handover.GPUTime, clients func(handle uint32) (Client, bool)) {
	for _, v := range list {
		x := s.onGPU(v.GPU)
		if x == nil {
			continue
		}
		x.off, x.offAll, x.refused, x.drift = v.Off, v.OffAll, v.Refused, v.Drift
		x.active.Store(v.Active)
		x.local.Restore(v.Local)
		for _, m := range v.Lost {
			if c, ok := clients(m.Client); ok {
				x.lost[c] = &absence{since: time.Unix(0, m.Since), looked: time.Unix(0, m.Looked), off: m.Off}
			}
		}
	}
}

// Rejoin takes up what is outside of this program: the GPUs' pages, and the rescuer. It comes before Begin.
func (s *Scheduler) Rejoin(list []handover.GPUTime, rescuer *handover.Rescuer) error {
	for _, v := range list {
		if x := s.onGPU(v.GPU); x != nil && v.Place > 0 {
			x.joinPage(func(runDir, uuid string) (*peerpage.Entry, error) { return peerpage.Rejoin(runDir, uuid, v.Place) })
		}
	}
	if rescuer == nil {
		return nil
	}
	r, err := reopenRescue(s.Config)
	if err != nil {
		return err
	}
	s.rescue = r
	r.gone.Store(rescuer.Gone)
	if rescuer.Pipe > 0 {
		r.pipe = os.NewFile(uintptr(rescuer.Pipe), "rescuer")
	}
	if rescuer.PID > 0 && !rescuer.Gone {
		if r.process, err = os.FindProcess(rescuer.PID); err != nil {
			return fmt.Errorf("find the rescuer: %w", err)
		}
		go func() { // it is this process' child, as it was
			_, _ = r.process.Wait()
			r.gone.Store(true)
		}()
	}
	return nil
}

// reopenRescue maps the file that says what is off.
func reopenRescue(cfg guardcfg.Config) (*rescue, error) {
	r := &rescue{path: LeftoversFile(cfg.Socket), entries: max(cfg.Settings.MaxChannels, 64)}
	f, err := os.OpenFile(r.path, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open what is paused: %w", err)
	}
	defer f.Close()
	size := rescueHeader + len(cfg.GPUs)*r.section()
	if info, err := f.Stat(); err != nil || info.Size() != int64(size) {
		return nil, fmt.Errorf("%s is not of this version", r.path)
	}
	if r.mem, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %s: %w", r.path, err)
	}
	return r, nil
}
