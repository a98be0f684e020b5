// SPDX-License-Identifier: Apache-2.0

package quota

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

// RefusePreload refuses what the preload library cannot do by itself, for nodes on which it alone enforces. A promise that
// nobody keeps would be worse than none.
func (q *Quota) RefusePreload() error {
	var reason string
	var keys []key
	switch {
	case q.Spill != 0:
		reason, keys = "device memory is not served from host memory", []key{memSpill}
	case q.Percent != 0:
		reason, keys = "no percentage of a GPU's time can be enforced", []key{corePercentage}
	case q.Priority != PriorityDefault:
		reason, keys = "there are no priorities", []key{priority, highPrio}
	case q.NoLimiter:
		reason, keys = "nothing else than the library enforces the limit", []key{limiter}
	default:
		return nil
	}
	return q.refuse(`with enforcement = "preload" in cgpu.toml `+reason, `set enforcement = "guard" in cgpu.toml, or leave it out`, keys...)
}

// refuse makes the error for a setting that is well-formed; it is read from the first of keys that was asked for. It is not inlined
// for the reason that bad is not.
//
//go:noinline
func (q *Quota) refuse(reason, remedy string, keys ...key) error {
	name, value := q.source(keys...)
	return &Error{name, value, reason, remedy}
}
