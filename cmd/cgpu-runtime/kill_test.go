// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/domain"
)

func TestDomainEnd(t *testing.T) {
	if domainEnd != domain.EndName {
		t.Errorf("%q, want %q", domainEnd, domain.EndName)
	}
}
