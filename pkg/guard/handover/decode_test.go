// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

func state(t testing.TB, version string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/" + version + ".json")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestVersions: what each version wrote is read, for as long as it is said that it is. A version that is added adds a file.
func TestVersions(t *testing.T) {
	if !slices.Contains(Versions(), Version) {
		t.Errorf("what is written (%d) is not read %v", Version, Versions())
	}
	for version, name := range map[int]string{1: "v1"} {
		if !slices.Contains(Versions(), version) {
			t.Errorf("version %d is not read", version)
		}
		s, err := Decode(state(t, name))
		if err != nil || s.Version != version {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(Versions()) != 1 {
		t.Errorf("versions %v: want a file and a row of each", Versions())
	}
}

// TestDecodeHostile: what refers to nothing, or names a descriptor twice, is no state.
func TestDecodeHostile(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*State)
		why    string
	}{
		"another version":       {func(s *State) { s.Version = 2 }, "version 2"},
		"no GPUs":               {func(s *State) { s.Config.GPUs = nil }, "0 GPUs"},
		"one account too many":  {func(s *State) { s.Account.GPUs = append(s.Account.GPUs, GPU{}) }, "1 GPUs, and 2 accounts"},
		"no filter":             {func(s *State) { s.Process.Listeners = nil }, "filter is missing"},
		"no socket":             {func(s *State) { s.Process.Seccomp = 0 }, "socket"},
		"standard input":        {func(s *State) { s.Process.Seccomp = 2 }, "descriptor 2"},
		"a filter of nothing":   {func(s *State) { s.Process.Listeners = append(s.Process.Listeners, 0) }, "filter without"},
		"a file of nothing":     {func(s *State) { s.Files[0].Weak.Epoll = 0 }, "followed by nothing"},
		"negative descriptor":   {func(s *State) { s.Files[0].Weak.Epoll = -5 }, "descriptor -5"},
		"a descriptor twice":    {func(s *State) { s.Process.Control = s.Process.Seccomp }, "named twice"},
		"a child that is none":  {func(s *State) { s.Process.Trial = -1 }, "process -1, by which"},
		"a keeper that is none": {func(s *State) { s.Process.Keeper = -1 }, "process -1, the keeper"},
		"a nice value too low":  {func(s *State) { n := -21; s.Process.Nice = &n }, "nice value"},
		"no first process":      {func(s *State) { s.Process.InitPID = 0 }, "first process"},
		"RM client without GPU": {func(s *State) { s.Process.RM.Devices = nil }, "RM client"},
		"instance of no GPU":    {func(s *State) { s.Process.Instances = map[uint32]int{0: 7} }, "GPU 7"},
		"charge on no GPU":      {func(s *State) { s.Account.Charges[0].GPU = 1 }, "GPU 1 of 1"},
		"charge below 0":        {func(s *State) { s.Account.Charges[0].Handles = -1 }, "references"},
		"client twice":          {func(s *State) { s.Account.Clients[1].Handle = s.Account.Clients[0].Handle }, "there twice"},
		"client on no file":     {func(s *State) { s.Account.Clients[0].File = 1000 }, "file 1000"},
		"object of nobody":      {func(s *State) { s.Account.Objects[0].Client = 0 }, "no client"},
		"object of no client":   {func(s *State) { s.Account.Objects[0].Client = 1000 }, "client 1000"},
		"object of no charge":   {func(s *State) { s.Account.Objects[0].Charge = -1 }, "charge -1"},
		"object twice":          {func(s *State) { s.Account.Objects[1] = s.Account.Objects[0] }, "there twice"},
		"notifies nothing":      {func(s *State) { s.Account.Objects[0].Notifies = []int{0} }, "object 0"},
		"window of two":         {func(s *State) { s.Account.Loose = []int{1, 1} }, "window 1"},
		"window nowhere":        {func(s *State) { s.Account.Windows[0].File = nil }, "a window's file"},
		"mapping of nothing":    {func(s *State) { s.Account.DMA = []DMA{{}} }, "mapping of nothing"},
		"retained of nothing":   {func(s *State) { s.Account.Retained = []Retained{{Channel: 100000}} }, "object 100000"},
		"file without one":      {func(s *State) { s.Files[0].Weak = nil }, "descriptors"},
		"export of no charge":   {func(s *State) { s.Files[0].Exports = []Export{{Charge: 1 << 20}} }, "charge"},
		"mapping backwards":     {func(s *State) { s.Files[0].Maps = []UVMMap{{Base: 2, End: 1}} }, "mapping from"},
		"channel not kept":      {func(s *State) { s.Files[0].Channels = []UVMChannel{{}} }, "not kept"},
		"process twice":         {func(s *State) { s.Processes[1].PID = s.Processes[0].PID }, "process"},
		"thread of nobody":      {func(s *State) { s.Tasks[0].PID = 1 << 20 }, "thread"},
		"answer of two lengths": {func(s *State) { s.Tasks[0].Saved.Out[0].Data = nil }, "differ in length"},
		"answer in no parts":    {func(s *State) { s.Tasks[0].Saved.Out, s.Tasks[0].Saved.Before = nil, nil }, "0 parts"},
		"managed backwards":     {func(s *State) { s.Managed.Spans[0].End = 0 }, "managed memory"},
		"time on no GPU":        {func(s *State) { s.GPUTime[0].GPU = -1 }, "GPU -1"},
		"no plan":               {func(s *State) { s.GPUTime[0].Local.Plan.Weight = 0 }, "plan"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := Decode(state(t, "v1"))
			if err != nil {
				t.Fatal(err)
			}
			c.change(s)
			b, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			if _, err = Decode(b); err == nil || !strings.Contains(err.Error(), c.why) {
				t.Errorf("%v: want %q", err, c.why)
			}
		})
	}
	if _, err := Decode(make([]byte, MaxSize+1)); err == nil || !strings.Contains(err.Error(), "the most") {
		t.Errorf("too large: %v", err)
	}
}

// FuzzDecode: whatever is read, it is refused or has nothing that refers to nothing (pkg/guard restores what this finds).
func FuzzDecode(f *testing.F) {
	f.Add(state(f, "v1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Decode(b)
		if err != nil {
			return
		}
		again, err := Encode(s)
		if err == nil {
			_, err = Decode(again)
		}
		if err != nil {
			t.Errorf("what was read is refused when it is written: %v", err)
		}
	})
}
