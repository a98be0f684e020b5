// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/opencgpu/cgpu/pkg/agent"
	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// The front ends.
const (
	frontDRA    = agent.FrontDRA
	frontPlugin = agent.FrontPlugin
)

// settings are the flags, checked.
type settings struct {
	node                string
	frontEnds           []string
	draGPUs, pluginGPUs *agent.Selection // nil: all
	unit                quota.Bytes
	names               deviceplugin.Names
	kubeconfig          string
	cdiDir, kubeletDir  string
	nriSocket           string
	hook, health        string
	smi, web            bool
	logFormat, podUID   string
}

// settingsOf reads the flags, without looking at the node.
func settingsOf(f flags) (s settings, err error) {
	if s.node, err = f.node(); err != nil {
		return s, err
	}
	if s.frontEnds, err = frontEndsOf(f.values["frontends"]); err != nil {
		return s, err
	}
	if err := s.divide(f.values["dra-gpus"], f.values["deviceplugin-gpus"]); err != nil {
		return s, err
	}
	if s.unit, err = unitOf(f.values["memory-unit"]); err != nil {
		return s, err
	}
	if s.names, err = namesOf(f.values["memory-resource"], f.values["percent-resource"]); err != nil {
		return s, err
	}
	for _, p := range []struct {
		flag string
		to   *string
	}{{"cdi-dir", &s.cdiDir}, {"kubelet-dir", &s.kubeletDir}, {"hook", &s.hook}, {"nri-socket", &s.nriSocket}} {
		if *p.to, err = absolute(p.flag, f.values[p.flag]); err != nil {
			return s, err
		}
	}
	if s.health = f.values["health-address"]; s.health == "none" {
		s.health = ""
	}
	for _, p := range []struct {
		flag string
		to   *bool
	}{{"smi", &s.smi}, {"web", &s.web}} {
		text := f.values[p.flag]
		if text != "on" && text != "off" {
			return s, fmt.Errorf("--%s %q: want on or off", p.flag, text)
		}
		*p.to = text == "on"
	}
	if s.web && (!s.smi || s.health == "") {
		return s, errors.New("--web on: it tells what --smi does, at --health-address: want --smi on and an address")
	}
	if s.logFormat = f.values["log-format"]; s.logFormat != "text" && s.logFormat != "json" {
		return s, fmt.Errorf("--log-format %q: want text or json", s.logFormat)
	}
	s.kubeconfig, s.podUID = f.values["kubeconfig"], f.values["pod-uid"]
	return s, nil
}

// unitOf reads a unit: GiB, MiB, or so many of one. Small ones are too many for the kubelet on large GPUs; pkg/deviceplugin knows
// how many there are.
func unitOf(text string) (quota.Bytes, error) {
	for suffix, size := range map[string]quota.Bytes{"GiB": quota.GiB, "MiB": quota.MiB} {
		number, found := strings.CutSuffix(text, suffix)
		if !found {
			continue
		}
		if number == "" {
			return size, nil
		}
		if n, err := strconv.ParseUint(number, 10, 20); err == nil && n > 0 {
			return quota.Bytes(n) * size, nil
		}
	}
	return 0, fmt.Errorf("--memory-unit %q: want GiB, MiB or a size such as 256MiB", text)
}

// namesOf reads what pods call the device plugin's resources: names of extended resources, which are domain/name.
func namesOf(memory, percent string) (n deviceplugin.Names, err error) {
	for _, p := range []struct {
		flag, text string
		to         *string
	}{{"memory-resource", memory, &n.Memory}, {"percent-resource", percent, &n.Percent}} {
		domain, _, found := strings.Cut(p.text, "/")
		wrong := validation.IsQualifiedName(p.text)
		if !found || len(wrong) > 0 || strings.HasSuffix("."+domain, ".kubernetes.io") || strings.HasPrefix(domain, "requests.") {
			return n, fmt.Errorf("--%s %q: want the name of an extended resource, such as tencent.com/vcuda-memory", p.flag, p.text)
		}
		*p.to = p.text
	}
	if n.Memory == n.Percent {
		return n, fmt.Errorf("--memory-resource and --percent-resource: both are %q: want two names", memory)
	}
	if n == (deviceplugin.Names{Memory: deviceplugin.ResourceMemory, Percent: deviceplugin.ResourcePercent}) {
		n = deviceplugin.Names{}
	}
	return n, nil
}

// frontEndsOf reads which there are to be. One that follows another scheduler has all GPUs of the node: what that has given out no other
// front end knows, nor the other way.
func frontEndsOf(text string) (list []string, err error) {
	for _, name := range fields(text) {
		if decision.Find(name) != nil && len(fields(text)) == 1 {
			return []string{name}, nil
		}
		if name != frontDRA && name != frontPlugin {
			return nil, fmt.Errorf("--frontends %q: %q is none: want dra, deviceplugin or dra,deviceplugin; or one of %s, alone", text, name,
				strings.Join(decision.Names(), ", "))
		}
		if slices.Contains(list, name) {
			return nil, fmt.Errorf("--frontends %q: has %s twice", text, name)
		}
		list = append(list, name)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("--frontends %q: want dra, deviceplugin or dra,deviceplugin", text)
	}
	return list, nil
}

// divide reads which GPUs are whose. Two front ends know nothing of each other's pods: a GPU that both advertise is promised
// twice, so with both each must be given its own.
func (s *settings) divide(dra, plugin string) error {
	for _, f := range []struct {
		flag, front, text string
		to                **agent.Selection
	}{{"dra-gpus", frontDRA, dra, &s.draGPUs}, {"deviceplugin-gpus", frontPlugin, plugin, &s.pluginGPUs}} {
		on := slices.Contains(s.frontEnds, f.front)
		switch {
		case f.text == "" && on && len(s.frontEnds) > 1:
			return fmt.Errorf("--%s: is missing: with two front ends each must be told its GPUs, or both would promise the same", f.flag)
		case f.text == "":
			continue
		case !on:
			return fmt.Errorf("--%s %q: --frontends has no %s", f.flag, f.text, f.front)
		}
		list, err := agent.ParseSelection(fields(f.text))
		if err != nil {
			return fmt.Errorf("--%s: %w", f.flag, err)
		}
		*f.to = &list
	}
	if s.draGPUs != nil && s.pluginGPUs != nil {
		if both := s.draGPUs.Meets(*s.pluginGPUs); len(both) > 0 {
			return fmt.Errorf("--dra-gpus and --deviceplugin-gpus: both have %s: name each GPU in one", strings.Join(both, ", "))
		}
	}
	if s.draGPUs != nil && len(fields(dra)) == 0 || s.pluginGPUs != nil && len(fields(plugin)) == 0 {
		return errors.New("--dra-gpus, --deviceplugin-gpus: an empty list: leave the front end out of --frontends")
	}
	return nil
}

// fields are the parts of a list with commas.
func fields(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}
