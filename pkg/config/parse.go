// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/pelletier/go-toml/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// file is cgpu.toml as it is written. Pointers tell a key that is absent from one that is zero; any is a size, which may stand without
// quotation marks: 6 is "6".
type file struct {
	Driver             *string      `toml:"driver"`
	DriverRoot         *string      `toml:"driver_root"`
	Runtimes           *[]string    `toml:"runtimes"`
	Overcommit         *float64     `toml:"overcommit"`
	MaxInst            *int64       `toml:"max_inst"`
	Placement          *string      `toml:"placement"`
	AllowUnknownDriver *bool        `toml:"allow_unknown_driver"`
	ContextOverhead    any          `toml:"context_overhead"`
	GuardStartTimeout  *string      `toml:"guard_start_timeout"`
	MaxClients         *int64       `toml:"max_clients"`
	MaxTSGs            *int64       `toml:"max_tsgs"`
	MaxChannels        *int64       `toml:"max_channels"`
	CallsPerSecond     *int64       `toml:"calls_per_second"`
	CallsBurst         *int64       `toml:"calls_burst"`
	Policy             *string      `toml:"policy"`
	PrioRatio          *int64       `toml:"prio_ratio"`
	BaseTimeslice      *string      `toml:"base_timeslice"`
	MinTimeslice       *string      `toml:"min_timeslice"`
	MaxRound           *string      `toml:"max_round"`
	HighPrioTimeslice  *string      `toml:"high_prio_timeslice"`
	MaxLoss            *string      `toml:"max_loss"`
	CapCycle           *string      `toml:"cap_cycle"`
	SwitchRecords      *bool        `toml:"switch_records"`
	Enforcement        *string      `toml:"enforcement"`
	Limits             *string      `toml:"limits"`
	Managed            *string      `toml:"managed"`
	HMM                *bool        `toml:"hmm"`
	Domains            []fileDomain `toml:"domains"`
	Profiling          *bool        `toml:"profiling"`
	Graphics           *bool        `toml:"graphics"`
	Keeper             *bool        `toml:"keeper"`
	MaxSpill           any          `toml:"max_spill"`
	SpillReserve       any          `toml:"spill_reserve"`
	MaxHostMemory      any          `toml:"max_host_memory"`
	Headroom           any          `toml:"headroom"`
	HeadroomCores      *string      `toml:"headroom_cores"`
	Dialects           *[]string    `toml:"dialects"`
	Pods               *string      `toml:"pods"`
	PodSettings        *[]string    `toml:"pod_settings"`
	PodResources       *string      `toml:"pod_resources"`
	Health             *string      `toml:"health"`
	HealthIgnoreXids   *[]int64     `toml:"health_ignore_xids"`
	Sim                struct {
		DriverVersion *string    `toml:"driver_version"`
		GPUs          *[]fileGPU `toml:"gpus"`
	} `toml:"sim"`
}

type fileGPU struct {
	Name   *string `toml:"name"`
	Memory any     `toml:"memory"`
	UUID   *string `toml:"uuid"`
	BusID  *string `toml:"bus_id"`
}

type fileDomain struct {
	Name       *string  `toml:"name"`
	Weight     *int64   `toml:"weight"`
	Percent    *int64   `toml:"percent"`
	Users      []string `toml:"users"`
	Namespaces []string `toml:"namespaces"`
	Shared     bool     `toml:"shared"`
}

// Parse reads the text of a configuration file; name stands for the file in messages.
func Parse(name string, text []byte) (Config, error) {
	var f file
	if err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(&f); err != nil {
		return Config{}, decodeError(name, text, err)
	}
	c, err := f.config()
	if bad, ok := errors.AsType[*badValue](err); ok {
		return Config{}, fmt.Errorf("config: %s: %w", at(name, lineOf(text, bad.key)), bad)
	}
	return c, err
}

// config checks the values and fills in the defaults.
func (f file) config() (Config, error) {
	c := Default()
	s := &c.Settings
	for _, err := range []error{
		choice("driver", f.Driver, &c.Driver, device.DriverNVIDIA, device.DriverSim),
		folder("driver_root", f.DriverRoot, &c.DriverRoot),
		runtimes(f.Runtimes, &s.Runtimes),
		overcommit(f.Overcommit, &s.Overcommit),
		whole("max_inst", f.MaxInst, &s.MaxInst, 1, sched.MaxMaxInst),
		choice("placement", f.Placement, &s.Placement, "binpack", "spread"),
		size("context_overhead", f.ContextOverhead, &s.ContextOverhead, true),
		duration("guard_start_timeout", f.GuardStartTimeout, &s.GuardStartTimeout, 100*time.Millisecond, 5*time.Minute),
		whole("max_clients", f.MaxClients, &s.MaxClients, 1, 1<<16),
		whole("max_tsgs", f.MaxTSGs, &s.MaxTSGs, 1, 1<<16),
		whole("max_channels", f.MaxChannels, &s.MaxChannels, 1, 1<<16),
		whole("calls_per_second", f.CallsPerSecond, &s.CallsPerSecond, 1, 1<<30),
		whole("calls_burst", f.CallsBurst, &s.CallsBurst, 1, 1<<30),
		policy(f.Policy, &s.Policy),
		whole("prio_ratio", f.PrioRatio, &s.PrioRatio, sched.MinPrioRatio, sched.MaxPrioRatio),
		duration("base_timeslice", f.BaseTimeslice, &s.BaseTimeslice, time.Millisecond, 100*time.Millisecond),
		duration("min_timeslice", f.MinTimeslice, &s.MinTimeslice, 200*time.Microsecond, 100*time.Millisecond),
		duration("max_round", f.MaxRound, &s.MaxRound, 10*time.Millisecond, time.Second),
		duration("high_prio_timeslice", f.HighPrioTimeslice, &s.HighPrioTimeslice, 50*time.Microsecond, time.Millisecond),
		percentage("max_loss", f.MaxLoss, &s.MaxLoss, 1, 50),
		duration("cap_cycle", f.CapCycle, &s.CapCycle, 50*time.Millisecond, 500*time.Millisecond),
		choice("enforcement", f.Enforcement, &s.Enforcement, device.EnforceGuard, device.EnforcePreload),
		choice("managed", f.Managed, &s.Managed, device.ManagedLimit, device.ManagedDeny, device.ManagedAllow),
		part("max_spill", f.MaxSpill, &s.MaxSpill, "the host's memory", 100),
		part("spill_reserve", f.SpillReserve, &s.SpillReserve, "the host's memory", 100),
		part("max_host_memory", f.MaxHostMemory, &s.MaxHostMemory, "the host's memory", 100),
		part("headroom", f.Headroom, &s.Headroom, "each GPU's memory", device.MostHeadroom),
		percentage("headroom_cores", f.HeadroomCores, &s.HeadroomCores, 0, device.MostHeadroom),
		dialects(f.Dialects, &s.Dialects),
		domains(f.Domains, &s.Domains),
		choice("pods", f.Pods, &s.Pods, device.PodsAny, device.PodsAllocated, device.PodsGPUShare),
		podSettings(f.PodSettings, &s.PodSettings),
		socket("pod_resources", f.PodResources, &s.PodResources),
		choice("health", f.Health, &s.Health, device.HealthOn, device.HealthOff, device.HealthEvict),
		ignoreXids(f.HealthIgnoreXids, &s.HealthIgnoreXids),
		sim(f, &c.Sim),
	} {
		if err != nil {
			return Config{}, err
		}
	}
	if s.MinTimeslice > s.BaseTimeslice {
		return Config{}, fault("min_timeslice", s.MinTimeslice.String(), fmt.Sprintf("want no more than base_timeslice, %v", s.BaseTimeslice))
	}
	if err := f.limits(&c); err != nil {
		return Config{}, err
	}
	if f.SwitchRecords != nil {
		s.NoSwitchRecords = !*f.SwitchRecords
	}
	if f.HMM != nil {
		s.HMM = *f.HMM
	}
	if f.Profiling != nil {
		s.Profiling = *f.Profiling
	}
	if f.Graphics != nil {
		s.Graphics = *f.Graphics
	}
	if f.Keeper != nil {
		s.Keeper = *f.Keeper
	}
	if f.AllowUnknownDriver != nil {
		s.AllowUnknownDriver = *f.AllowUnknownDriver
	}
	return c, nil
}

// limits reads who limits memory. Whether the driver can, cgpu-refresh finds out.
func (f file) limits(c *Config) error {
	by := device.LimitsGuard
	err := choice("limits", f.Limits, &by, device.LimitsGuard, device.LimitsBoth, device.LimitsDriver)
	switch {
	case err != nil || by == device.LimitsGuard:
		return err
	case c.Driver == device.DriverSim:
		return fault("limits", by, `the simulated driver has no memory limits of its own: want "guard", or leave it out`)
	case by == device.LimitsDriver && f.Enforcement != nil:
		return fault("limits", by, "there is neither a guard nor the library then: leave out enforcement, or limits")
	case by == device.LimitsDriver:
		c.Settings.Enforcement = device.EnforceDriver
	}
	c.Settings.DriverLimits = true
	return nil
}

func choice(key string, in, out *string, allowed ...string) error {
	if in == nil {
		return nil
	}
	for _, a := range allowed {
		if *in == a {
			*out = a
			return nil
		}
	}
	return fault(key, *in, `want "`+strings.Join(allowed, `" or "`)+`"`)
}

func policy(in *string, out *sched.Policy) error {
	if in == nil {
		return nil
	}
	p, err := sched.ParsePolicy(*in)
	if err != nil {
		return fault("policy", *in, `want "`+strings.Join(sched.PolicyNames(), `", "`)+`", or a number from "0" to "5"`)
	}
	*out = p
	return nil
}

func whole(key string, in *int64, out *int, low, high int64) error {
	if in == nil {
		return nil
	}
	if *in < low || *in > high {
		return fault(key, *in, fmt.Sprintf("want a whole number from %d to %d", low, high))
	}
	*out = int(*in)
	return nil
}

func overcommit(in, out *float64) error {
	if in == nil {
		return nil
	}
	if math.IsNaN(*in) || *in < 1 || *in > 100 {
		return fault("overcommit", *in, "want a ratio from 1.0 (the limits on a GPU never pass its memory) to 100.0")
	}
	*out = *in
	return nil
}

// maxSize keeps sums of sizes far from the end of 64 bits.
const maxSize = quota.Bytes(1 << 50)

func size(key string, in any, out *quota.Bytes, zero bool) error {
	if in == nil {
		return nil
	}
	text := written(in)
	if zero && text == "0" {
		*out = 0
		return nil
	}
	b, err := quota.ParseSize(text)
	if err != nil {
		return fault(key, in, err.Error()+`; want a size such as "13MiB" or "1.5GiB"`)
	}
	if b > maxSize {
		return fault(key, in, "is more than a GPU of this world has; want at most "+maxSize.String())
	}
	*out = b
	return nil
}

// part reads an amount of host memory: a percentage of it, a size, or "0".
func part(key string, in any, out *device.Part, whole string, most uint64) error {
	if in == nil {
		return nil
	}
	want := fmt.Sprintf(`want a part of %s such as "50%%", from "0%%" to "%d%%", or a size such as "64GiB"`, whole, most)
	text := written(in)
	if number, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseUint(number, 10, 8)
		if err != nil || n > most {
			return fault(key, in, want)
		}
		*out = device.Part{Percent: int(n)}
		return nil
	}
	if text == "0" {
		*out = device.Part{}
		return nil
	}
	b, err := quota.ParseSize(text)
	if err != nil {
		return fault(key, in, err.Error()+"; "+want)
	}
	if b > maxSize {
		return fault(key, in, "is more memory than a machine of this world has; want at most "+maxSize.String())
	}
	*out = device.Part{Bytes: b}
	return nil
}

func percentage(key string, in *string, out *int, low, high int) error {
	if in == nil {
		return nil
	}
	text, ok := strings.CutSuffix(*in, "%")
	n, err := strconv.Atoi(text)
	if !ok || err != nil || n < low || n > high {
		return fault(key, *in, fmt.Sprintf("want whole percent, from %d%% to %d%%", low, high))
	}
	*out = n
	return nil
}

func duration(key string, in *string, out *time.Duration, low, high time.Duration) error {
	if in == nil {
		return nil
	}
	d, err := time.ParseDuration(*in)
	if err != nil || d < low || d > high {
		return fault(key, *in, fmt.Sprintf("want a duration with its unit, from %v to %v", low, high))
	}
	*out = d
	return nil
}

func runtimes(in, out *[]string) error {
	if in == nil {
		return nil
	}
	if len(*in) == 0 {
		return fault("runtimes", []any{}, "want at least one low-level runtime, such as [\"runc\"]")
	}
	for _, r := range *in {
		// A name is looked up in PATH; a relative path would depend on the engine's working directory.
		if r == "" || strings.Contains(r, "/") && !filepath.IsAbs(r) {
			return fault("runtimes", r, "want a program's name or its absolute path")
		}
		if base := filepath.Base(r); base == "cgpu-runtime" {
			return fault("runtimes", r, "cgpu-runtime cannot call itself; want runc or crun")
		}
	}
	*out = *in
	return nil
}

// maxDomains bounds the trust domains, each of which may have a server on each GPU, and who may join one.
const maxDomains = 64

// domains reads the trust domains.
func domains(in []fileDomain, out *[]device.Domain) error {
	if len(in) > maxDomains {
		return fault("domains", fmt.Sprintf("%d domains", len(in)), fmt.Sprintf("want at most %d", maxDomains))
	}
	for i, f := range in {
		key := fmt.Sprintf("domains[%d].", i)
		d := device.Domain{Users: f.Users, Namespaces: f.Namespaces, Shared: f.Shared}
		if f.Name != nil {
			d.Name = *f.Name
		}
		if reason := quota.CheckDomain(d.Name); reason != "" {
			return fault(key+"name", d.Name, reason)
		}
		if slices.ContainsFunc(*out, func(o device.Domain) bool { return o.Name == d.Name }) {
			return fault(key+"name", d.Name, "want each domain once")
		}
		for _, err := range []error{
			whole(key+"weight", f.Weight, &d.Weight, 1, quota.MaxWeight),
			whole(key+"percent", f.Percent, &d.Percent, 1, quota.MaxPercent),
			words(key+"users", f.Users, isUser, `want users' names or numbers, such as ["ann", "1000"]`),
			words(key+"namespaces", f.Namespaces, isNamespace, `want namespaces of Kubernetes, or "*" for all`),
		} {
			if err != nil {
				return err
			}
		}
		if d.Shared && len(d.Namespaces) == 0 {
			return fault(key+"shared", true, "is for pods of several namespaces: name them in namespaces, or leave it out")
		}
		if !d.Shared && slices.Contains(d.Namespaces, "*") { // each has a server, of which the scheduler knows nothing
			return fault(key+"namespaces", "*", "want names, or shared = true: else each namespace that somebody makes has a domain of its own")
		}
		*out = append(*out, d)
	}
	return nil
}

// words checks a short list.
func words(key string, list []string, good func(string) bool, want string) error {
	if len(list) > maxDomains {
		return fault(key, fmt.Sprintf("%d words", len(list)), fmt.Sprintf("want at most %d", maxDomains))
	}
	for _, word := range list {
		if !good(word) {
			return fault(key, word, want)
		}
	}
	return nil
}

// isUser leaves out root, who may do all.
func isUser(name string) bool {
	return name != "" && len(name) <= 255 && name != "0" && name != "root" && !strings.ContainsFunc(name, unicode.IsSpace)
}

func isNamespace(name string) bool {
	return name == "*" || name != "" && len(name) <= 63 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

func dialects(in *[]string, out *[]quota.Dialect) error {
	if in == nil {
		return nil
	}
	*out = nil
	for _, name := range *in {
		d, err := quota.ParseDialect(name)
		if err != nil {
			return fault("dialects", name, err.Error())
		}
		if slices.Contains(*out, d) {
			return fault("dialects", name, "want each dialect once")
		}
		*out = append(*out, d)
	}
	return nil
}

func podSettings(in *[]string, out *[]quota.Choice) error {
	if in == nil {
		return nil
	}
	*out = nil
	for _, name := range *in {
		c := quota.Choice(name)
		switch {
		case !slices.Contains(quota.Choices(), c):
			return fault("pod_settings", name, `want "weight", "priority", "spill" or "percent"`)
		case slices.Contains(*out, c):
			return fault("pod_settings", name, "want each setting once")
		}
		*out = append(*out, c)
	}
	return nil
}

// maxXids bounds health_ignore_xids: there are fewer.
const maxXids = 256

func ignoreXids(in *[]int64, out *[]uint64) error {
	if in == nil {
		return nil
	}
	if len(*in) > maxXids {
		return fault("health_ignore_xids", fmt.Sprintf("%d numbers", len(*in)), fmt.Sprintf("want at most %d", maxXids))
	}
	*out = nil
	for _, n := range *in {
		if n < 1 || n > 1<<20 {
			return fault("health_ignore_xids", n, "want numbers of Xids, such as [74]")
		}
		*out = append(*out, uint64(n))
	}
	return nil
}

// socket reads the path of a UNIX socket, which the kernel takes up to 107 bytes of.
func socket(key string, in, out *string) error {
	if in == nil {
		return nil
	}
	if !filepath.IsAbs(*in) || filepath.Clean(*in) != *in || len(*in) > 107 {
		return fault(key, *in, "want the absolute path of a socket, at most 107 bytes")
	}
	*out = *in
	return nil
}

func folder(key string, in, out *string) error {
	if in == nil {
		return nil
	}
	if *in != "" && (!filepath.IsAbs(*in) || filepath.Clean(*in) != *in) {
		return fault(key, *in, `want the absolute path of a folder, or "" to look for it`)
	}
	*out = *in
	return nil
}

// maxSimGPUs is far above any machine and below minor 255, which is nvidiactl.
const maxSimGPUs = 64

func sim(f file, out *Sim) error {
	if v := f.Sim.DriverVersion; v != nil {
		if _, err := rm.ParseVersion(*v); err != nil {
			return fault("sim.driver_version", *v, "want a driver version such as 580.159.04")
		}
		out.DriverVersion = *v
	}
	if f.Sim.GPUs == nil {
		return nil
	}
	if n := len(*f.Sim.GPUs); n == 0 || n > maxSimGPUs {
		return fault("sim.gpus", fmt.Sprintf("%d GPUs", n), fmt.Sprintf("want 1 to %d", maxSimGPUs))
	}
	model := out.GPUs[0]
	out.GPUs = nil
	for i, in := range *f.Sim.GPUs {
		g, key := model, fmt.Sprintf("sim.gpus[%d].", i)
		if in.Name != nil {
			// NVML_DEVICE_NAME_V2_BUFFER_SIZE is 96 with the final zero.
			if g.Name = *in.Name; g.Name == "" || len(g.Name) > 95 || strings.ContainsFunc(g.Name, func(r rune) bool { return r < ' ' || r > '~' }) {
				return fault(key+"name", g.Name, "want 1 to 95 ASCII characters")
			}
		}
		if err := size(key+"memory", in.Memory, &g.Memory, false); err != nil {
			return err
		}
		if in.UUID != nil {
			if g.UUID = *in.UUID; !device.IsUUID(g.UUID) {
				return fault(key+"uuid", g.UUID, "want GPU- and a lower-case UUID; or leave it out")
			}
		}
		if in.BusID != nil {
			if g.BusID = *in.BusID; !device.IsBusID(g.BusID) {
				return fault(key+"bus_id", g.BusID, "want such as 0000:01:00.0, in lower case; or leave it out")
			}
		}
		out.GPUs = append(out.GPUs, g)
	}
	return nil
}
