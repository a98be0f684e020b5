// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
)

// cgpu runs a command line and returns what it printed, with the error behind.
func cgpu(args string) string {
	var out bytes.Buffer
	a := app()
	a.Writer, a.ErrWriter = &out, &out
	if err := run(a, append([]string{"cgpu"}, strings.Fields(args)...)); err != nil {
		out.WriteString("error: " + err.Error() + "\n")
	}
	return out.String()
}
