// SPDX-License-Identifier: Apache-2.0

package quota

import "strings"

// readLimiter reads whether the container gets the preload library.
func readLimiter(q *Quota, s *settings) error {
	v, err := q.used(s, limiter)
	if err != nil || !v.set {
		return err
	}
	switch v.value {
	case "on", "true", "1":
	case "off", "false", "0":
		q.NoLimiter = true
	default:
		return v.bad("want on or off", "")
	}
	return nil
}

// RefuseUnguarded refuses what needs a guard, for nodes on which by this setting of cgpu.toml containers have none: the preload library
// alone enforces, or the driver alone. A promise that nobody keeps would be worse than none.
func (q *Quota) RefuseUnguarded(setting string, driverOnly bool) error {
	var reason string
	var keys []key
	switch {
	case q.Spill != 0:
		reason, keys = "device memory is not served from host memory", []key{memSpill}
	case q.Percent != 0:
		reason, keys = "no percentage of a GPU's time can be enforced", []key{corePercentage}
	case q.Priority != PriorityDefault:
		reason, keys = "there are no priorities", []key{priority, highPrio}
	case q.Weight > 1 && driverOnly:
		reason, keys = "there are no weights", []key{schdWeight}
	case q.NoLimiter && !driverOnly:
		reason, keys = "nothing but the library enforces the limit, and CGPU_LIMITER leaves it out", []key{limiter}
	default:
		return nil
	}
	name, _, _ := strings.Cut(setting, " ")
	return q.refuse("with "+setting+" in cgpu.toml "+reason, "set "+name+` = "guard" in cgpu.toml, or leave it out`, keys...)
}

// refuse makes the error for a setting that is well-formed; it is read from the first of keys that was asked for. It is not inlined
// for the reason that bad is not.
//
//go:noinline
func (q *Quota) refuse(reason, remedy string, keys ...key) error {
	name, value := q.source(keys...)
	return &Error{name, value, reason, remedy}
}
