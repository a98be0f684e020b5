// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// An allocation of Kubernetes is memory that a scheduler counted once. But containers start by what is written in their
// config.json, and ten of them can name one claim, or one can be started again while the one before it lives. So it is here
// that an allocation is held by no more containers than it is for.

// exclusive says whether the container has a GPU whole by an allocation.
func (r Record) exclusive(uuid string) bool {
	return slices.Contains(r.Native, uuid) && slices.ContainsFunc(r.Allocated, func(a Allocation) bool { return a.UUID == uuid })
}

// Holds says whether the container has something of the share with that ID.
func (r Record) Holds(id string) bool {
	return slices.ContainsFunc(r.Allocated, func(a Allocation) bool { return a.ID == id })
}

// refuseHeld says which allocation of a request is in use by as many containers as it is for; nil when none is.
func refuseHeld(records []Record, req Request) *Refusal {
	for _, a := range req.Record.Allocated {
		held, holder := 0, ""
		for _, r := range records {
			if r.Holds(a.ID) {
				held++
				holder = r.label()
			}
		}
		if held < max(a.Containers, 1) {
			continue
		}
		refusal := &Refusal{
			Held:   true,
			Reason: fmt.Sprintf("allocation %s is held by %d containers, the most that it is for, such as %s", a.ID, held, holder),
			Remedy: "stop that container, give each a claim of its own, or let the claim be for more (containers in its VGPUConfig)",
		}
		if i := req.gpu(a.UUID); i >= 0 {
			refusal.GPU = req.GPUs[i]
		}
		return refusal
	}
	return nil
}

// dyingTime bounds how long Reserve waits for containers that are about to be gone; were the new one refused, the kubelet
// would try again only after ten seconds, and then twenty, and with restartPolicy Never not at all. There are two kinds.
//
// The kubelet starts a container again as soon as the one before it has ended, and its guard may still be giving back.
//
// And a scheduler gives a GPU's memory away anew as soon as a pod is gone from the API, which a pod that is deleted by force
// is while its containers still live. It counts what it allocates, so what other allocations have too much will be gone soon.
const dyingTime = 5 * time.Second

// reserveOnceFree is Reserve, tried again while the request is refused and such a container is in its way.
func (l *Ledger) reserveOnceFree(req Request, try func() (Record, error)) (Record, error) {
	pause := 10 * time.Millisecond
	// Longer and longer pauses: when a node is full, many may wait here, and each try holds the lock.
	for deadline := time.Now().Add(l.dyingTime); ; pause = min(2*pause, 200*time.Millisecond) {
		reserved, err := try()
		refusal, refused := errors.AsType[*Refusal](err)
		if !refused || len(req.Record.Allocated) == 0 || time.Now().After(deadline) {
			return reserved, err
		}
		records, listErr := l.List()
		passes := func(r Record) bool {
			if slices.ContainsFunc(req.Record.Allocated, func(a Allocation) bool { return r.Holds(a.ID) }) {
				return l.dying(r)
			}
			return !refusal.Held && len(r.Allocated) > 0 && r.has(refusal.GPU.UUID)
		}
		if listErr == nil && !slices.ContainsFunc(records, passes) {
			// It may have gone between the two looks.
			return try()
		}
		time.Sleep(pause)
	}
}

// has says whether the container has the GPU or a slice of it.
func (r Record) has(uuid string) bool {
	return slices.Contains(r.Native, uuid) || slices.ContainsFunc(r.VGPUs, func(v VGPU) bool { return v.UUID == uuid })
}

// dying: the container's first process has ended, or its create has without making any, and only its guard is left.
func (l *Ledger) dying(r Record) bool {
	if r.InitPID != 0 {
		return l.status(r.InitPID, r.InitStart) == dead
	}
	return l.status(r.LauncherPID, r.LauncherStart) == dead
}
