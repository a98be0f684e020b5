// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"strconv"
)

// Bounds of the compute settings.
const (
	MaxWeight  = 64
	MaxPercent = 100
)

// Share is what a container asked of a GPU's time.
type Share struct {
	Weight   int      `json:"weight"`            // 1 to MaxWeight
	Percent  int      `json:"percent,omitempty"` // 1 to MaxPercent; 0: none asked
	Priority Priority `json:"priority"`
}

// readCompute reads weight, percent and priority.
func readCompute(q *Quota, s *settings) (err error) {
	if q.Weight, err = readSmall(q, s, schdWeight, MaxWeight); err != nil {
		return err
	}
	if q.Percent, err = readSmall(q, s, corePercentage, MaxPercent); err != nil {
		return err
	}
	return readPriority(q, s)
}

var priorityNames = [...]string{PriorityBestEffort: "best-effort", PriorityDefault: "default", PriorityHigh: "high"}

const wantPriority = "want best-effort, default or high"

// ParsePriority reads the name of a priority.
func ParsePriority(s string) (Priority, error) {
	for p, name := range priorityNames {
		if s == name {
			return Priority(p), nil
		}
	}
	return 0, errors.New(wantPriority)
}

// readPriority reads the level by its name, which is an annotation only, and cGPU's variable, which is a yes or no. The
// name beats the variable. Of the name and cGPU's setting as an annotation the lower counts: the latter is what a device
// plugin allows, and the name may be a pod author's who asks for less.
func readPriority(q *Quota, s *settings) error {
	name, err := q.used(s, priority)
	if err != nil {
		return err
	}
	if name.set {
		if q.Priority, err = ParsePriority(name.value); err != nil {
			return name.bad(err.Error(), "")
		}
		if !s.annotations[highPrio].set {
			return nil
		}
	}
	prio, err := q.used(s, highPrio)
	if err != nil || !prio.set {
		return err
	}
	asked := PriorityDefault
	switch prio.value {
	case "1", "true":
		asked = PriorityHigh
	case "0", "false":
	default:
		return prio.bad("want 1 or true for high priority, 0 or false for the default", "")
	}
	if !name.set || asked < q.Priority {
		q.Priority = asked
	}
	return nil
}

// RefuseTime makes the error for a share of a GPU's time that cannot be promised. It names the percentage that was asked
// for, else the weight; nil when neither was, so that no setting is at fault.
func (q *Quota) RefuseTime(reason, remedy string) error {
	for _, k := range []key{corePercentage, schdWeight} {
		if name, value := q.source(k); value != "" {
			return &Error{name, value, reason, remedy}
		}
	}
	return nil
}

// readSmall reads a whole number from 1 to most; 0 when it is not set.
func readSmall(q *Quota, s *settings, k key, most uint64) (int, error) {
	v, err := q.used(s, k)
	if err != nil || !v.set {
		return 0, err
	}
	want := "want a whole number from 1 to " + strconv.FormatUint(most, 10)
	n, reason := parseWhole(v.value, want)
	if reason == "" && n > most {
		reason = want
	}
	if reason != "" {
		return 0, v.bad(reason, "")
	}
	return int(n), nil
}
