// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"go/format"
	"go/scanner"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// tok is a token of Go; at and end are offsets in the file.
type tok struct {
	at, end int
	kind    token.Token
}

// breakGo breaks a line at a time, since gofmt moves what is behind it.
func breakGo(text []byte) ([]byte, error) {
	for tried := map[string]bool{}; ; {
		next, line := breakOne(text, tried)
		if next == nil {
			return text, nil
		}
		formatted, err := format.Source(next)
		if err != nil {
			return nil, err
		}
		tried[line] = bytes.Equal(formatted, text) // gofmt has undone it
		text = formatted
	}
}

// breakOne breaks the first long line that has not been tried, and returns nil where there is none.
func breakOne(text []byte, tried map[string]bool) (broken []byte, line string) {
	tokens := scan(text)
	for start := 0; start < len(text); {
		end := start + bytes.IndexByte(append(text[start:len(text):len(text)], '\n'), '\n')
		line := string(text[start:end])
		if long(line) && !tried[line] {
			if broken := breakLine(text, start, end, of(tokens, start, end)); broken != nil {
				return broken, line
			}
		}
		start = end + 1
	}
	return nil, ""
}

func scan(text []byte) (tokens []tok) {
	fset := token.NewFileSet()
	file := fset.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	for {
		pos, kind, lit := s.Scan()
		if kind == token.EOF {
			return tokens
		}
		if kind == token.SEMICOLON && lit == "\n" {
			continue
		}
		if lit == "" {
			lit = kind.String()
		}
		tokens = append(tokens, tok{file.Offset(pos), file.Offset(pos) + len(lit), kind})
	}
}

// of returns the tokens of a line, or nil where one began or ends elsewhere: a raw string, a block comment.
func of(tokens []tok, start, end int) (line []tok) {
	for _, t := range tokens {
		if t.at < start && t.end > start || t.at < end && t.end > end {
			return nil
		}
		if t.at >= start && t.end <= end {
			line = append(line, t)
		}
	}
	return line
}

func insert(text []byte, at int, what string) []byte {
	return slices.Concat(text[:at], []byte(what), text[at:])
}

func breakLine(text []byte, start, end int, line []tok) []byte {
	if len(line) == 0 {
		return nil
	}
	last := line[len(line)-1]
	indent := string(text[start:line[0].at])
	switch {
	case line[0].kind == token.COMMENT:
		return breakComment(text, start, end, indent)
	case last.kind == token.COMMENT: // it goes above
		above := indent + string(text[last.at:last.end]) + "\n"
		return insert(slices.Concat(text[:last.at], text[end:]), start, above)
	}
	if at := place(text, start, end, line); at > 0 {
		return insert(text, at, "\n")
	}
	return breakString(text, start, line)
}

// place is where a line of code is best broken: behind the last operator, comma or dot that is in few brackets and near neither end.
func place(text []byte, start, end int, line []tok) (at int) {
	best, depth := 1000, 0
	for i, t := range line[:len(line)-1] {
		column := utf8.RuneCount(text[start:t.end])
		if column > limit {
			break
		}
		switch t.kind {
		case token.LPAREN, token.LBRACK, token.LBRACE:
			if t.kind == token.LBRACE && depth == 0 && line[0].kind == token.FUNC && line[i+1].kind != token.RBRACE && i > 0 &&
				line[i-1].kind != token.INTERFACE && line[i-1].kind != token.STRUCT {
				return t.end // a function in one line
			}
			depth++
		case token.RPAREN, token.RBRACK, token.RBRACE:
			depth--
		case token.COMMA, token.LAND, token.LOR, token.ADD, token.PERIOD:
			cost := 4 * depth
			switch t.kind {
			case token.PERIOD:
				if i == 0 || line[i-1].kind != token.RPAREN {
					continue
				}
			case token.ADD: // binds more than a comma beside it
				cost += 4
			}
			if end-t.end < limit/6 {
				cost++
			}
			if column < limit/3 { // only where nothing else can be done
				cost += 100
			}
			if cost <= best {
				at, best = t.end, cost
			}
		}
	}
	return at
}

// breakString cuts the literal that goes beyond the limit.
func breakString(text []byte, start int, line []tok) []byte {
	for _, t := range line {
		if t.kind != token.STRING || text[t.at] != '"' || utf8.RuneCount(text[start:t.end]) <= limit-3 {
			continue
		}
		to := t.end
		for utf8.RuneCount(text[start:to]) > limit-3 {
			to--
		}
		if to <= t.at {
			return nil
		}
		if space := bytes.LastIndexByte(text[t.at:to], ' '); space > 20 {
			return insert(text, t.at+space+1, "\" +\n\"")
		}
		return nil
	}
	return nil
}

// breakComment cuts a comment; the rest goes before the text of the next line of the same paragraph.
func breakComment(text []byte, start, end int, indent string) []byte {
	line := string(text[start:end])
	prefix := indent + "// "
	if !strings.HasPrefix(line, prefix) || strings.Contains(line, "://") {
		return nil
	}
	head, rest := wrap(line, prefix, func(int) bool { return true })
	if rest == "" {
		return nil
	}
	if next := string(text[min(end+1, len(text)):]); strings.HasPrefix(next, prefix) && words(next[len(prefix):]) {
		return slices.Concat(text[:start], []byte(head+"\n"+prefix+rest+" "), text[end+1+len(prefix):])
	}
	return slices.Concat(text[:start], []byte(head+"\n"+prefix+rest), text[end:])
}

var marker = regexp.MustCompile("^([-*+#>|%\\s]|[0-9]+[.)] |$|```)")

// words says that a text goes on with a paragraph, and is no item of a list, heading or example.
func words(text string) bool { return !marker.MatchString(text) }
