// SPDX-License-Identifier: Apache-2.0

// Svg draws the text of a terminal on standard input as a picture on standard output, light or dark as the reader has it:
//
//	go run ./hack/svg "cgpu smi" <docs/images/smi.txt >docs/images/smi.svg
//
// Its argument names the picture for those who cannot see it. docs/images/smi.txt is real output; hack/svg/smi.sh records it.
package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	if len(args) != 1 {
		return fmt.Errorf("svg: %d arguments: want one, the name of the picture", len(args))
	}
	text, err := io.ReadAll(in)
	if err != nil {
		return fmt.Errorf("svg: standard input: %w", err)
	}
	_, err = io.WriteString(out, draw(args[0], string(text)))
	return err
}

// Sizes in units of the picture. Every line is stretched to its number of characters, so that columns stand below one another whatever
// font the reader has.
const (
	charWidth  = 7.2
	lineHeight = 16
	margin     = 14
	titleBar   = 26
)

const style = `  <style>
    .window { fill: #ffffff; stroke: #d0d7de }
    .bar { fill: #f6f8fa }
    .dot { fill: #d0d7de }
    text { fill: #1f2328; font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }
    .rule { fill: #8c959f }
    .name { fill: #57606a }
    @media (prefers-color-scheme: dark) {
      .window { fill: #0d1117; stroke: #30363d }
      .bar { fill: #161b22 }
      .dot { fill: #30363d }
      text { fill: #e6edf3 }
      .rule { fill: #6e7681 }
      .name { fill: #9ea7b1 }
    }
  </style>
`

// draw makes the picture of a terminal with that text in it.
func draw(name, text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	widest := 0
	for _, l := range lines {
		widest = max(widest, utf8.RuneCountInString(l))
	}
	width := float64(widest)*charWidth + 2*margin
	height := len(lines)*lineHeight + titleBar + 2*margin
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" role="img" aria-label="%s">`+"\n",
		width, height, escape(name))
	b.WriteString(style)
	fmt.Fprintf(&b, "  <rect class=\"window\" x=\".5\" y=\".5\" width=\"%.0f\" height=\"%d\" rx=\"8\"/>\n", width-1, height-1)
	fmt.Fprintf(&b, "  <path class=\"bar\" d=\"M1 %d V9 a8 8 0 0 1 8 -8 H%.0f a8 8 0 0 1 8 8 V%d z\"/>\n", titleBar, width-9, titleBar)
	for i := range 3 {
		fmt.Fprintf(&b, "  <circle class=\"dot\" cx=\"%d\" cy=\"13\" r=\"5\"/>\n", 18+16*i)
	}
	fmt.Fprintf(&b, "  <text class=\"name\" x=\"%.0f\" y=\"17\" text-anchor=\"middle\">%s</text>\n", width/2, escape(name))
	for i, l := range lines {
		n := utf8.RuneCountInString(l)
		if strings.TrimSpace(l) == "" {
			continue
		}
		class := ""
		if strings.Trim(l, "+-=") == "" {
			class = ` class="rule"`
		}
		fmt.Fprintf(&b, "  <text%s x=\"%d\" y=\"%d\" textLength=\"%.1f\" lengthAdjust=\"spacingAndGlyphs\" xml:space=\"preserve\">%s</text>\n",
			class, margin, titleBar+margin+lineHeight*i+11, float64(n)*charWidth, escape(l))
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// escape makes text of a terminal fit for XML.
func escape(s string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(s)) //nolint:errcheck // a Builder takes all
	return b.String()
}
