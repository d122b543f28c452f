package replica

import (
	"testing"

	"github.com/torchft/torchft/go/internal/testmain"
)

func TestMain(m *testing.M) { testmain.NoGoroutineIsLeft(m) }
