package tracing

import (
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/metadata"

	"github.com/torchft/torchft/go/internal/testmain"
)

func TestTheEnvironmentDecides(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		want []string
		err  string
	}{
		{nil, nil, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []string{"otlp"}, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, []string{"otlp"},
			""},
		{map[string]string{"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/v1/logs"}, nil, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp, console"}, []string{"otlp", "console"}, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"},
			nil, ""},
		{map[string]string{"OTEL_SDK_DISABLED": "True", "OTEL_TRACES_EXPORTER": "otlp"}, nil, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, nil,
			`OTEL_TRACES_EXPORTER is "zipkin": allowed are none, or otlp and console`},
	} {
		kinds, err := Exporters(func(name string) string { return tc.env[name] })
		assert.Equal(t, tc.want, kinds, tc.env)
		if tc.err != "" {
			assert.EqualError(t, err, tc.err)
		} else {
			assert.NoError(t, err)
		}
	}
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestOffItDoesNothing(t *testing.T) {
	span := Continue(parent, "x", 1)
	assert.Nil(t, span)
	span.Set()
	span.End(errors.New("failed"))
	assert.Empty(t, span.Parent())
	assert.Equal(t, context.Background(), Below(context.Background(), span.Parent()))
	assert.Zero(t, testing.AllocsPerRun(100, func() { Continue(parent, "x", 1).End(nil) }))
}

// The reader of standard error may end before this process: the spans are lost then, and nothing else.
func TestAReaderThatHasEndedEndsNoProcess(t *testing.T) {
	testmain.WithoutReader(t, func() {
		log.SetOutput(io.Discard) // otel reports there that it could not write
		Setup(slog.Default())
		Continue(parent, "x", 1).End(nil)
		Flush()
	}, "OTEL_TRACES_EXPORTER=console")
}

func TestASpanIsAChildOfItsParent(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	defer Use(sdktrace.NewSimpleSpanProcessor(spans))()
	for _, invalid := range []string{"", "x", "00-00000000000000000000000000000000-b7ad6b7169203331-01",
		parent[:54]} {
		assert.Nil(t, Continue(invalid, "x", 1), invalid)
	}
	outer := Continue(parent, "outer", 7)
	ctx := Below(context.Background(), outer.Parent())
	assert.Equal(t, outer.Parent(), ParentOf(ctx))
	sent, _ := metadata.FromOutgoingContext(ctx)
	inner := Continue(Incoming(metadata.NewIncomingContext(context.Background(), sent)), "inner", 7)
	inner.End(errors.New("no quorum"))
	outer.End(nil)
	found := spans.GetSpans()
	require.Len(t, found, 2)
	assert.Equal(t, "0af7651916cd43dd8448eb211c80319c", found[0].SpanContext.TraceID().String())
	assert.Equal(t, found[1].SpanContext.SpanID(), found[0].Parent.SpanID())
	assert.Equal(t, "b7ad6b7169203331", found[1].Parent.SpanID().String())
	assert.Equal(t, "no quorum", found[0].Status.Description)
	assert.EqualValues(t, 7, found[0].Attributes[0].Value.AsInt64())
}
