// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Faults are sentences, with the line, the key, the value as it stands there, and what is wanted; nothing of the program's own types.
func TestFaultsInWords(t *testing.T) {
	for text, want := range map[string]string{
		`max_inst = "x"`:                            `config: f:1: max_inst = "x": want a whole number without quotation marks`,
		`max_inst = 1.5`:                            `config: f:1: max_inst = 1.5: want a whole number`,
		`max_inst = [1]`:                            `config: f:1: max_inst = [1]: want a whole number`,
		"\nhmm = \"no\"":                            `config: f:2: hmm = "no": want true or false`,
		`policy = 1`:                                `config: f:1: policy = 1: want text in quotation marks`,
		`overcommit = "2"`:                          `config: f:1: overcommit = "2": want a number`,
		`dialects = "mps"`:                          `config: f:1: dialects = "mps": want a list, in brackets, of text`,
		`dialects = ["mps", 3]`:                     `config: f:1: dialects = ["mps", 3]: want a list`,
		`health_ignore_xids = 74`:                   `config: f:1: health_ignore_xids = 74: want a list, in brackets, of a whole number`,
		`sim = 3`:                                   `config: f:1: sim = 3: want a table`,
		"[sim]\ngpus = 2":                           `config: f:2: sim.gpus = 2: want tables [[sim.gpus]]`,
		"[[sim.gpus]]\n[[sim.gpus]]\nname = 4":      `config: f:3: sim.gpus.name: want text in quotation marks`,
		"driver = \"sim\"\nspill_reserve = \"6 p\"": `config: f:2: spill_reserve = "6 p": is no size; want`,
		`max_spill = true`:                          `config: f:1: max_spill = true: is no size; want`,
		`max_spill = -6`:                            `config: f:1: max_spill = -6: is no size; want`,
		`max_spill = 2026-11-21`:                    `config: f:1: max_spill = 2026-11-21: is no size; want`,
		"[max_spill]\na = 1":                        `config: f:1: max_spill = a table: is no size; want`,
		"[sim]\n\ngpus = []":                        `config: f:3: sim.gpus`,
		"[[sim.gpus]]\n[[sim.gpus]]\n\nmemory = \"6 potatoes\"\n[[sim.gpus]]\nmemory = \"x\"": `config: f:4: sim.gpus[1].memory = "6 potatoes": is no size; want`,
		"[sim]\ngpus = [{memory = \"x\"}]":                      `config: f:2: sim.gpus[0].memory = "x": is no size`,
		"\"max_inst\" = 0":                                      `config: f:1: max_inst = 0: want`,
		"min_timeslice = \"11ms\"":                              `config: f:1: min_timeslice = "11ms": want no more than`,
		"base_timeslice = \"1ms\"\n\n\nmin_timeslice = \"2ms\"": `config: f:4: min_timeslice = "2ms": want no more than`,
		"max_isnt = 3":                                          `config: f:1: unknown key max_isnt: want one of docs/variables.md, each with its default in configs/cgpu.toml of the sources; did you mean max_inst?`,
		"[[sim.gpus]]\nmemry = 6":                               `config: f:2: unknown key sim.gpus.memry: want one of docs/variables.md, each with its default in configs/cgpu.toml of the sources; did you mean memory?`,
		"frobnicate = 3":                                        `config: f:1: unknown key frobnicate: want one of docs/variables.md, each with its default in configs/cgpu.toml of the sources`,
		`max_inst = "`:                                          `config: f:1: `,
		"max_inst = 3\nmax_inst = 4":                            `config: f:`,
	} {
		_, err := Parse("f", []byte(text))
		switch {
		case err == nil:
			t.Errorf("%q: accepted", text)
		case !strings.HasPrefix(err.Error(), want):
			t.Errorf("%q:\n got %v\nwant %s", text, err, want)
		case strings.ContainsAny(err.Error(), "\n") || strings.Contains(err.Error(), "config.file") || strings.Contains(err.Error(), "int64"):
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A size reads alike with and without quotation marks.
func TestSizesWithoutQuotes(t *testing.T) {
	for text, want := range map[string]quota.Bytes{"6": 6 * quota.GiB, `"6"`: 6 * quota.GiB, "1.5": 1536 * quota.MiB,
		`"1.5"`: 1536 * quota.MiB, "0": 0, `"0"`: 0} {
		got, err := Parse("f", []byte("max_spill = "+text+"\ncontext_overhead = "+text+"\n"))
		if err != nil || got.Settings.MaxSpill != (device.Part{Bytes: want}) || got.Settings.ContextOverhead != want {
			t.Errorf("%s: %v, %v, %v", text, got.Settings.MaxSpill, got.Settings.ContextOverhead, err)
		}
		if want == 0 {
			continue
		}
		if got, err = Parse("f", []byte("[[sim.gpus]]\nmemory = "+text)); err != nil || got.Sim.GPUs[0].Memory != want {
			t.Errorf("%s: %v, %v", text, got.Sim, err)
		}
	}
}
