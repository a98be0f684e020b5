// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

func TestAskKubelet(t *testing.T) {
	c := spec.PodContainer{Namespace: "ml", Pod: "train", UID: "u", Container: "main"}
	ask := func(script string, timeout time.Duration) (quota.Units, error) {
		path := filepath.Join(t.TempDir(), "cgpu-podresources")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
		return askKubelet(path, "/s", c, timeout)
	}
	got, err := ask(`[ "$*" = "/s 20s ml train main" ] && printf 'memory 3\npercent 30\ngpu GPU-a 15\nend\n'`, 20*time.Second)
	if want := (quota.Units{Memory: 3, Percent: 30, PerGPU: map[string]int{"GPU-a": 15}}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for script, want := range map[string]string{
		"echo /s: nobody answers; exit 1": "the kubelet did not tell what is allocated: /s: nobody answers",
		"kill -9 $$":                      "the kubelet did not tell",
		"echo memory 3":                   `said "an answer without an end"`,
		"exit 0":                          "an answer without an end",
		"echo memory; echo end":           "is it of the same version",
		"echo memory -1; echo end":        "is it of the same version",
		"echo shiny 1; echo end":          "is it of the same version",
		"echo percent 101; echo end":      "is it of the same version",
	} {
		if _, err := ask(script, 20*time.Second); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", script, err, want)
		}
	}
	begin := time.Now()
	if _, err := ask("exec sleep 60", 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), "was not done after 50ms") ||
		time.Since(begin) > 20*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	if _, err := askKubelet(filepath.Join(t.TempDir(), "missing"), "/s", c, time.Second); err == nil {
		t.Error("a program that is not there")
	}
}
