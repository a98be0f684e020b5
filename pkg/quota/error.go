// SPDX-License-Identifier: Apache-2.0

package quota

import "strconv"

// Error is a request that cannot be granted as it stands: it always names what to change.
type Error struct {
	Variable string // the variable or annotation at fault
	Value    string // its value, whole; Error shortens it
	Reason   string
	Remedy   string // may be empty where the reason says what is wanted
}

// maxShown bounds the part of a value that a message repeats. The message ends up in one JSON line of runc's log and in
// the engine's reply, and the value may be megabytes of anything.
const maxShown = 40

// Error is one line, for whoever wrote the value; so it begins with the variable. Control characters of the value are quoted and a long
// value is cut.
func (e *Error) Error() string {
	s := e.Variable + "=" + show(e.Value) + ": " + e.Reason
	if e.Remedy != "" {
		s += "; " + e.Remedy
	}
	return s
}

// show quotes a value for a message.
func show(v string) string {
	if len(v) <= maxShown {
		return strconv.Quote(v)
	}
	return strconv.Quote(v[:maxShown]) + "…(" + strconv.Itoa(len(v)) + " bytes)"
}
