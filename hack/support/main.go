// SPDX-License-Identifier: Apache-2.0

// Command support writes docs/support.md: what cgpu was tried with, and how. Run it in the repository's root.
//
//	go run ./hack/support          write docs/support.md (make support)
//
// What is known stands in facts.go. Its test fails when the page is stale, when a test that a row names is no longer there, when a commit
// has no place in docs/measurements.md, and when a driver branch or a GPU architecture of pkg/rm's tables has no row.
package main

import (
	"log"
	"os"
)

const page = "docs/support.md"

func main() {
	log.SetFlags(0)
	text, err := render(".")
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(page, []byte(text), 0o644); err != nil {
		log.Fatal(err)
	}
}
