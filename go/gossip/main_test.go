package gossip

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/torchft/torchft/go/internal/testmain"
)

func TestMain(m *testing.M) {
	// Memberlist's Shutdown does not wait for its last probe, which ends by itself.
	testmain.Run(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}
