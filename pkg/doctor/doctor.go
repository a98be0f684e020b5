// SPDX-License-Identifier: Apache-2.0

// Package doctor looks at a node and says what of cgpu works on it, and what to do about the rest.
//
// A check is data: a name, what it means, a remedy, and a function from a Host to a Result. Functions that judge (of a text, a
// report of a child, a list of records) are pure; the files of the machine are read below Host.Root, and what must be tried
// is tried by a child process (kernel.go, driver.go), because a filter cannot be taken off and a driver's call may hang.
package doctor

import (
	"fmt"
	"strings"
)

// Status is how a check ended.
type Status string

// From good to bad. Skip is for what does not apply here, or cannot be looked at because of what failed before.
const (
	OK   Status = "ok"
	Skip Status = "skip"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Result is what a check found.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Found  string `json:"found"`
	Remedy string `json:"remedy,omitempty"`
	// Figures are what --measure measured, of each GPU.
	Figures []Figure `json:"figures,omitempty"`
}

// Check is one thing to look at.
type Check struct {
	Name  string
	Means string // what is looked at and why it matters, for docs/doctor.md
	// Remedy is what to do when the check does not end well and the result itself names nothing better.
	Remedy string
	Run    func(*Host) Result
}

// Report is the outcome of a list of checks.
type Report struct {
	Status Status   `json:"status"` // the worst of them
	Checks []Result `json:"checks"`
}

// Examine runs checks, one after the other: each may use what one before it has found out. A result without a status is not
// reported: an earlier check has said why there is nothing to say.
func Examine(h *Host, checks []Check) Report {
	r := Report{Status: OK}
	for _, c := range checks {
		res := c.Run(h)
		if res.Status == "" {
			continue
		}
		res.Name = c.Name
		switch {
		case res.Status == OK || res.Status == Skip:
			res.Remedy = ""
		case res.Remedy == "":
			res.Remedy = c.Remedy
		}
		if res.Status == Fail || res.Status == Warn && r.Status != Fail {
			r.Status = res.Status
		}
		r.Checks = append(r.Checks, res)
	}
	return r
}

// Count is how many checks ended in a way.
func (r Report) Count(s Status) (n int) {
	for _, c := range r.Checks {
		if c.Status == s {
			n++
		}
	}
	return n
}

func ok(format string, args ...any) Result { return Result{Status: OK, Found: line(format, args...)} }
func skip(format string, args ...any) Result {
	return Result{Status: Skip, Found: line(format, args...)}
}
func warn(format string, args ...any) Result {
	return Result{Status: Warn, Found: line(format, args...)}
}
func fail(format string, args ...any) Result {
	return Result{Status: Fail, Found: line(format, args...)}
}

// but gives a result a remedy of its own.
func (r Result) but(format string, args ...any) Result {
	r.Remedy = line(format, args...)
	return r
}

// line keeps a result on one line: texts of the kernel, of files and of programs are in it.
func line(format string, args ...any) string {
	return strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " ")
}
