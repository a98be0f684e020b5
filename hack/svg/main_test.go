// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "draw the pictures in docs/images anew")

// The pictures in the docs are drawn from the texts beside them.
func TestPictures(t *testing.T) {
	for _, name := range []string{"smi", "top"} {
		path := "../../docs/images/" + name
		text, err := os.ReadFile(path + ".txt")
		if err != nil {
			t.Fatal(err)
		}
		got := draw("cgpu "+name, string(text))
		if *update {
			if err := os.WriteFile(path+".svg", []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path + ".svg")
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s.svg is not what %[1]s.txt gives; go test ./hack/svg -update draws it anew", path)
		}
	}
}

func TestDraw(t *testing.T) {
	got := draw(`a "name"`, "+--+\n| <&> é |\n\nlast\n\n")
	for d := xml.NewDecoder(strings.NewReader(got)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("no XML: %v in\n%s", err, got)
		}
	}
	for _, want := range []string{`class="rule"`, "| &lt;&amp;&gt; é |", `textLength="64.8"`, `y="99"`, "&#34;name&#34;"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
}

func TestRunRefuses(t *testing.T) {
	if err := run(nil, strings.NewReader(""), io.Discard); err == nil {
		t.Error("ran without a name")
	}
}
