package sim

import (
	"flag"
	"os"
	"runtime/debug"
	"testing"
)

func TestMain(m *testing.M) {
	// A run keeps little and makes much garbage: collecting it at four megabytes would be half of the work.
	debug.SetGCPercent(1600)
	flag.Parse()
	if run := flag.Lookup("test.run"); *seedFlag >= 0 && run.Value.String() == "" {
		if err := run.Value.Set("^TestSeed$"); err != nil { // -seed asks for one history
			panic(err)
		}
	}
	os.Exit(m.Run())
}
