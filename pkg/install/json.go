// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io"
	"strings"

	"github.com/opencgpu/cgpu/pkg/engine"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// InJSON does what is ordered, Install or Uninstall, and prints what was done as JSON.
func (t Target) InJSON(w io.Writer, o Order, do func(io.Writer, Order) error) error {
	done := schema.Install{Schema: schema.Version, Engine: t.Name, Runtime: o.Name, Config: o.Config, DryRun: o.DryRun,
		Files: []schema.InstallFile{}, Lines: []string{}}
	o.Edited = func(e engine.Edit) { done.Files = append(done.Files, fileOf(e, o.DryRun)) }
	var text strings.Builder
	err := do(&text, o)
	for line := range strings.Lines(text.String()) {
		done.Lines = append(done.Lines, strings.TrimSuffix(line, "\n"))
	}
	if err != nil && len(done.Files) == 0 {
		return err
	}
	return errors.Join(terminal.EncodeJSON(w, done, "  "), err)
}

func fileOf(e engine.Edit, dryRun bool) schema.InstallFile {
	f := schema.InstallFile{Path: e.Path, Change: "edited"}
	switch {
	case e.Before == nil:
		f.Change = "made"
	case e.After == nil:
		f.Change = "removed"
	}
	if dryRun {
		f.Diff = engine.Diff(e)
	}
	return f
}
