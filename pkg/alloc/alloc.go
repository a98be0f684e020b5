// SPDX-License-Identifier: Apache-2.0

// Package alloc is how an allocation of Kubernetes travels from cgpu-agent to cgpu-runtime: the shares of GPUs that a
// container was given, written where the author of a pod cannot write.
//
// There are two ways. A DRA claim reaches the container as a CDI device, whose edits cannot be annotations, and whose
// variables a reader of config.json cannot tell from the pod's own; but the hooks of config.json are the engine's alone. So
// a share is an OCI hook (Hook): cgpu-runtime reads it and takes it out, and where runc gets it instead, because the pod
// has no RuntimeClass, it runs and refuses the start. A device plugin may set annotations, which containerd passes on
// where container_annotations lists them; those of the pod never get that name as long as pod_annotations does not.
//
// The package is pure. cgpu-agent encodes, pkg/admit and cgpu-hook decode.
package alloc

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Prefix is that of the annotations that only a device plugin sets. containerd's container_annotations must list it, and its
// pod_annotations must not match it.
const Prefix = "alloc.cgpu.io/"

// The annotations of a device plugin. The kubelet calls Allocate once for each resource, so the memory and the percentage
// come apart.
const (
	AnnotationShares  = Prefix + "shares"  // Shares as text, joined by ";"
	AnnotationPercent = Prefix + "percent" // of each of these shares, 1 to 100
)

// HookCommand is the command of cgpu-hook by which a share is an OCI hook. It is the first of three arguments after the
// program's name: the command, AnnotationShares (by which config.json is recognised as one of ours), the share.
const HookCommand = "allocated"

// MaxText bounds the text of a share, MaxShares their number in a container: a claim has at most 32 results
// (resource.k8s.io/v1, AllocationResultsMaxSize).
const (
	MaxText   = 1024
	MaxShares = 32
)

// Share is one vGPU, or one whole GPU, of a container.
type Share struct {
	// ID names what was allocated, for one create after the other: "<claim UID>/<share ID>", or what the device plugin
	// made up. At no moment may the containers that have it hold more than Containers vGPUs of it.
	ID string
	// UUID of the GPU; empty: the node chooses (only where the allocator knows none).
	UUID string
	// Whole is the GPU without a limit and unshared; Limit is zero then, and nothing of what follows is set.
	Whole bool
	// Domain is the trust domain, among those of the claim's namespace, in which the containers compute; empty: each by itself.
	Domain string
	// Containers may use the share at the same time, each with all of Slice; at least 1.
	Containers int
	// Slice is one container's. A Weight of 0 is the default.
	quota.Slice
}

// Text is what Parse reads: name=value pairs joined by commas, sizes in bytes. Not String, which cgpu-runtime would link for package fmt.
func (s Share) Text() string {
	list := []string{"id=" + s.ID}
	if s.UUID != "" {
		list = append(list, "uuid="+s.UUID)
	}
	if s.Whole {
		return strings.Join(append(list, "memory=all"), ",")
	}
	add := func(name string, numbers ...uint64) {
		for _, n := range numbers {
			if n != 0 {
				list = append(list, name+"="+strconv.FormatUint(n, 10))
			}
		}
	}
	add("memory", uint64(s.Limit))
	if s.Containers > 1 {
		add("containers", uint64(s.Containers))
	}
	add("percent", uint64(s.Percent))
	add("weight", uint64(s.Weight))
	if s.Priority != quota.PriorityDefault {
		list = append(list, "priority="+s.Priority.String())
	}
	add("spill", uint64(s.Spill))
	if s.Domain != "" {
		list = append(list, "domain="+s.Domain)
	}
	return strings.Join(list, ",")
}

// Parse reads what Text wrote. What it does not know it refuses: a share understood by half may be no limit.
func Parse(text string) (Share, error) {
	s, err := parse(text)
	if err != nil {
		shown := text
		if len(shown) > 80 {
			shown = shown[:80] + "…"
		}
		return Share{}, fmt.Errorf("alloc: share %q: %w: is cgpu-agent newer than the node's cgpu?", shown, err)
	}
	return s, nil
}

func parse(text string) (Share, error) {
	if len(text) > MaxText {
		return Share{}, fmt.Errorf("has %d bytes, at most %d are read", len(text), MaxText)
	}
	s := Share{Containers: 1}
	s.Priority = quota.PriorityDefault
	seen := map[string]bool{}
	for _, pair := range strings.Split(text, ",") {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || value == "" || seen[name] {
			return Share{}, fmt.Errorf("%q: want each name=value once", pair)
		}
		seen[name] = true
		if err := s.set(name, value); err != nil {
			return Share{}, fmt.Errorf("%s: %w", name, err)
		}
	}
	switch {
	case s.ID == "":
		return Share{}, errors.New("id: is missing")
	case !seen["memory"]:
		return Share{}, errors.New("memory: is missing")
	case s.Whole && (s.UUID == "" || len(seen) != 3):
		return Share{}, errors.New("memory=all: wants id and uuid, and nothing else")
	}
	return s, nil
}

// set reads one pair.
func (s *Share) set(name, value string) (err error) {
	switch name {
	case "id":
		s.ID, err = word(value)
	case "uuid":
		s.UUID, err = word(value)
	case "memory":
		if s.Whole = value == "all"; !s.Whole {
			s.Limit, err = size(value, quota.MiB)
		}
	case "containers":
		s.Containers, err = whole(value, 64)
	case "percent":
		s.Percent, err = whole(value, quota.MaxPercent)
	case "weight":
		s.Weight, err = whole(value, quota.MaxWeight)
	case "priority":
		s.Priority, err = quota.ParsePriority(value)
	case "spill":
		s.Spill, err = size(value, quota.MiB)
	case "domain":
		s.Domain = value
		if reason := quota.CheckDomain(value); reason != "" {
			err = errors.New(reason)
		}
	default:
		err = errors.New("is not known")
	}
	return err
}

// word reads an identifier: it goes into file names' neighbourhood and into messages.
func word(value string) (string, error) {
	if len(value) > 200 {
		return "", errors.New("is longer than 200 bytes")
	}
	for _, c := range []byte(value) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '.', c == '_', c == '/', c == ':':
		default:
			return "", fmt.Errorf("has the sign %q", c)
		}
	}
	return value, nil
}

// size reads bytes, at least least of them.
func size(value string, least quota.Bytes) (quota.Bytes, error) {
	n, err := strconv.ParseUint(value, 10, 63)
	if err != nil || quota.Bytes(n) < least {
		return 0, fmt.Errorf("%q: want a number of bytes, at least %v", value, least)
	}
	return quota.Bytes(n) / quota.MiB * quota.MiB, nil
}

// whole reads a number from 1 to most.
func whole(value string, most int) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > most {
		return 0, fmt.Errorf("%q: want 1 to %d", value, most)
	}
	return n, nil
}

// HookArgs are the arguments of the OCI hook (createRuntime) that carries s.
func HookArgs(s Share) []string {
	return []string{"cgpu-hook", HookCommand, AnnotationShares, s.Text()}
}

// FromHookArgs is the share in the arguments of an OCI hook; ours is false where the hook is another's.
func FromHookArgs(args []string) (s Share, ours bool, err error) {
	if len(args) < 3 || args[1] != HookCommand || args[2] != AnnotationShares {
		return Share{}, false, nil
	}
	if len(args) != 4 {
		return Share{}, true, fmt.Errorf("alloc: hook cgpu-hook %s: has %d arguments, want one share", HookCommand, len(args)-3)
	}
	s, err = Parse(args[3])
	return s, true, err
}

// Annotate is the value of AnnotationShares.
func Annotate(shares []Share) string {
	texts := make([]string, len(shares))
	for i, s := range shares {
		texts[i] = s.Text()
	}
	return strings.Join(texts, ";")
}

// FromAnnotations are the shares that a device plugin allocated; none where it allocated none.
func FromAnnotations(annotations map[string]string) ([]Share, error) {
	text, ok := annotations[AnnotationShares]
	percent, capped := annotations[AnnotationPercent]
	if !ok {
		if capped {
			return nil, fmt.Errorf("alloc: annotation %s=%q: there is no %s: ask for GPU memory too", AnnotationPercent, percent, AnnotationShares)
		}
		return nil, nil
	}
	if len(text) > MaxShares*(MaxText+1) {
		return nil, fmt.Errorf("alloc: annotation %s: has %d bytes", AnnotationShares, len(text))
	}
	var shares []Share
	for _, one := range strings.Split(text, ";") {
		s, err := Parse(one)
		if err != nil {
			return nil, err
		}
		if capped && !s.Whole {
			if s.Percent, err = whole(percent, quota.MaxPercent); err != nil {
				return nil, fmt.Errorf("alloc: annotation %s: %w", AnnotationPercent, err)
			}
		}
		shares = append(shares, s)
	}
	return shares, nil
}
