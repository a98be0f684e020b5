package main

import (
	"io"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// encodeJSON prints what goes to programs, and often to a terminal.
func encodeJSON(w io.Writer, v any, indent string) error { return terminal.EncodeJSON(w, v, indent) }

// printable is text that others chose, for a table.
func printable(s string) string { return terminal.Printable(s) }
