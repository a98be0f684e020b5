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

var update = flag.Bool("update", false, "draw docs/images/smi.svg anew")

// The picture in the docs is drawn from the text beside it.
func TestPictureOfSmi(t *testing.T) {
	const picture = "../../docs/images/smi.svg"
	text, err := os.ReadFile("../../docs/images/smi.txt")
	if err != nil {
		t.Fatal(err)
	}
	got := draw("cgpu smi", string(text))
	if *update {
		if err := os.WriteFile(picture, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(picture)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what docs/images/smi.txt gives; go test ./hack/svg -update draws it anew", picture)
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
