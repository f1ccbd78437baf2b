from tidemill.testing.feature_contract import FeatureContract


class TestRegisteredFeatures(FeatureContract):
    pass
